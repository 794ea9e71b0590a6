//! The date that a template may ask for: UTC, and the same for a whole run, so that a prompt keeps its beginning.

use minijinja::{Error, ErrorKind};
use std::sync::LazyLock;
use std::time::{SystemTime, UNIX_EPOCH};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// `strftime_now` of chat templates, for the formats of a date.
pub fn strftime_now(format: &str) -> Result<String, Error> {
    static DAYS: LazyLock<u64> = LazyLock::new(|| {
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        since.map_or(0, |since| since.as_secs() / 86_400)
    });
    formatted(*DAYS, format)
}

fn formatted(days: u64, format: &str) -> Result<String, Error> {
    let (year, month, day) = date(days);
    let mut text = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            text.push(c);
            continue;
        }
        match chars.next() {
            Some('Y') => text += &year.to_string(),
            Some('m') => text += &format!("{month:02}"),
            Some('d') => text += &format!("{day:02}"),
            Some('B') => text += MONTHS[month - 1],
            Some('b') => text += &MONTHS[month - 1][..3],
            Some('%') => text.push('%'),
            other => {
                let got = other.map_or(String::new(), String::from);
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now: the format has %{got}, want %Y, %m, %d, %B, %b or %%"),
                ));
            }
        }
    }
    Ok(text)
}

/// Year, month and day, so many days after 1970-01-01.
fn date(mut days: u64) -> (u64, usize, u64) {
    let leap = |year: u64| year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 0;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    (year, month + 1, days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_those_of_the_calendar() {
        for (days, want) in [
            (0, "1970-01-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (19_722, "2023-12-31"),
            (19_782, "2024-02-29"),
            (20_787, "2026-11-30"),
        ] {
            assert_eq!(formatted(days, "%Y-%m-%d").unwrap(), want);
        }
        assert_eq!(
            formatted(20_787, "%d %B %b %%").unwrap(),
            "30 November Nov %"
        );
        assert!(formatted(0, "%H").is_err());
    }
}
