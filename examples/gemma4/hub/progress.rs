//! A bar a file on a terminal, a line a file otherwise.

use crate::memory::human;
use indicatif::{ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::Instant;

pub struct Progress {
    bar: Option<ProgressBar>,
    file: String,
    start: Instant,
}

impl Progress {
    pub fn new(file: &str, size: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(size);
            let template = "{msg} {wide_bar} {bytes} of {total_bytes}, {bytes_per_sec}, {eta}";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar.with_message(file.to_string())
        });
        Self {
            bar,
            file: file.to_string(),
            start: Instant::now(),
        }
    }

    pub fn at(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.set_position(bytes);
        }
    }

    pub fn say(&self, what: &str) {
        match &self.bar {
            Some(bar) => bar.println(format!("{}: {what}", self.file)),
            None => say!("{}: {what}", self.file),
        }
    }

    pub fn done(self, bytes: u64) {
        match self.bar {
            Some(bar) => bar.finish_and_clear(),
            None => say!(
                "{}: {} in {:.1} s",
                self.file,
                human(bytes),
                self.start.elapsed().as_secs_f64()
            ),
        }
    }
}
