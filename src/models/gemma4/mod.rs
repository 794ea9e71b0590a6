//! The Gemma 4 text decoder.
