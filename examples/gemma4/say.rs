//! What goes to stderr beside the results.

/// As `eprintln!`, but a stderr that is closed or full does not end the program.
macro_rules! say {
    ($($words:tt)*) => {{
        use std::io::Write as _;
        writeln!(std::io::stderr(), $($words)*).ok();
    }};
}
