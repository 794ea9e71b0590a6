//! Tests alone; see docs/reliability.md for how they run.
