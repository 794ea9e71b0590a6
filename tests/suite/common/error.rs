use std::path::Path;

/// The text of an error without the backtrace that candle adds where `RUST_BACKTRACE` is set.
pub fn message(error: candle::Error) -> String {
    match error {
        candle::Error::WithBacktrace { inner, .. } => message(*inner),
        candle::Error::WithPath { inner, path } => {
            format!("{}: {}", path.display(), message(*inner))
        }
        candle::Error::Context { inner, context } => format!("{context}: {}", message(*inner)),
        other => other.to_string(),
    }
}

/// [`message`], with `dir` written as `[dir]`.
pub fn message_in(dir: &Path, error: candle::Error) -> String {
    message(error).replace(&dir.display().to_string(), "[dir]")
}
