//! Every integration test, in one binary: linking candle once keeps the suite quick to build.
