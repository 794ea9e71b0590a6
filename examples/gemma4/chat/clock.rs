//! The date and time that a template may ask for: UTC, and the same for a whole run, so that a prompt keeps its beginning.

use jiff::Timestamp;
use minijinja::{Error, ErrorKind};
use std::sync::LazyLock;

/// `strftime_now` of chat templates.
pub fn strftime_now(format: &str) -> Result<String, Error> {
    static STARTED: LazyLock<Timestamp> = LazyLock::new(Timestamp::now);
    formatted(*STARTED, format)
}

fn formatted(at: Timestamp, format: &str) -> Result<String, Error> {
    jiff::fmt::strtime::format(format, at).map_err(|e| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: format {format:?}: {e}"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_written_as_strftime_does_and_unknown_formats_are_refused() {
        let at: Timestamp = "2026-11-30T07:05:09Z".parse().unwrap();
        let text = formatted(at, "%d %B %Y, %b %m %%, %H:%M:%S").unwrap();
        assert_eq!(text, "30 November 2026, Nov 11 %, 07:05:09");
        let error = formatted(at, "%Y %Ö").unwrap_err().to_string();
        assert!(error.contains("strftime_now: format \"%Y %Ö\""), "{error}");
    }
}
