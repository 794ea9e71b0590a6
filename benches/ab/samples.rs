//! Samples of interleaved runs, and where they come from.

use std::process::Command;
use std::time::Instant;

use anyhow::{ensure, Result};
use serde::{Deserialize, Serialize};

use crate::quantiles;

/// Runs `n` times and returns the seconds of one.
pub type Run = Box<dyn FnMut(usize) -> Result<f64>>;

pub fn timed<T>(mut f: impl FnMut() -> Result<T> + 'static) -> Run {
    Box::new(move |n| {
        let start = Instant::now();
        for _ in 0..n {
            std::hint::black_box(f()?);
        }
        Ok(start.elapsed().as_secs_f64() / n as f64)
    })
}

/// Every arm once per round, the order reversed every other round; `least` seconds a sample.
pub fn interleave(runs: &mut [(Arm, Run)], rounds: usize, least: f64) -> Result<()> {
    // A sample is long enough for the clock and for rayon to be awake, whatever the size.
    let mut repeats = Vec::new();
    for (_, run) in runs.iter_mut() {
        run(1)?;
        let once = run(1)?;
        repeats.push((least / once).ceil().clamp(1.0, 2000.0) as usize);
    }
    for round in 0..rounds {
        let mut order: Vec<usize> = (0..runs.len()).collect();
        if round % 2 == 1 {
            order.reverse();
        }
        for i in order {
            let (arm, run) = &mut runs[i];
            arm.ms.push(run(repeats[i])? * 1e3);
        }
    }
    Ok(())
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Arm {
    pub name: String,
    /// Milliseconds of one run, one sample per round.
    pub ms: Vec<f64>,
}

impl Arm {
    pub fn new(name: &str) -> Self {
        Self {
            name: name.to_string(),
            ms: Vec::new(),
        }
    }

    pub fn quantile(&self, at: f64) -> f64 {
        quantiles::quantile(&self.ms, at)
    }

    pub fn median(&self) -> f64 {
        quantiles::median(&self.ms)
    }

    pub fn spread(&self) -> f64 {
        quantiles::spread(&self.ms)
    }

    /// The median over rounds.
    pub fn ratio(&self, to: &Arm) -> f64 {
        quantiles::median(&quantiles::ratios(&self.ms, &to.ms))
    }
}

/// What a receipt says about where its samples come from.
#[derive(Clone, Serialize, Deserialize)]
pub struct Origin {
    pub machine: String,
    pub threads: usize,
    pub commit: String,
    pub date: String,
    pub command: String,
}

impl Origin {
    /// Of this process, which is bench `bench`.
    pub fn of(bench: &str) -> Self {
        let say = |program: &str, args: &[&str]| {
            let output = Command::new(program).args(args).output().ok();
            output
                .and_then(|o| String::from_utf8(o.stdout).ok())
                .map(|s| s.trim().to_string())
                .unwrap_or_default()
        };
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let field = |name: &str| {
            cpu.lines()
                .find(|line| line.starts_with(name))
                .and_then(|line| line.split(": ").nth(1))
                .unwrap_or("?")
        };
        let command = std::env::args().skip(1).filter(|arg| arg != "--bench");
        let folderless = |arg: String| match arg.rsplit_once('/') {
            Some((_, last)) => last.to_string(),
            None => arg,
        };
        Self {
            machine: format!(
                "{} (family {} model {})",
                field("model name"),
                field("cpu family"),
                field("model\t")
            ),
            threads: rayon::current_num_threads(),
            commit: say("git", &["describe", "--always", "--dirty"]),
            date: say("date", &["-u", "+%Y-%m-%d"]),
            command: format!(
                "cargo bench --bench {bench} -- {}",
                command.map(folderless).collect::<Vec<_>>().join(" ")
            ),
        }
    }
}

/// What `cargo test` runs of this bench: the statistics on samples whose quantiles are known.
pub fn check_statistics() -> Result<()> {
    // Samples, their first quartile, median and third quartile.
    type Known = (&'static [f64], [f64; 3]);
    let known: [Known; 5] = [
        (&[7.0], [7.0, 7.0, 7.0]),
        (&[4.0, 2.0], [2.5, 3.0, 3.5]),
        (&[5.0, 1.0, 3.0], [2.0, 3.0, 4.0]),
        (&[8.0, 2.0, 4.0, 1.0], [1.75, 3.0, 5.0]),
        (&[5.0, 4.0, 3.0, 2.0, 1.0], [2.0, 3.0, 4.0]),
    ];
    for (samples, want) in known {
        let mut arm = Arm::new("known");
        arm.ms = samples.to_vec();
        let got = [0.25, 0.5, 0.75].map(|at| arm.quantile(at));
        ensure!(
            got == want,
            "quartiles of {samples:?}: {got:?}, want {want:?}"
        );
        ensure!(
            arm.median() == want[1],
            "median of {samples:?}: {}",
            arm.median()
        );
        let ends = [arm.quantile(0.0), arm.quantile(1.0)];
        let least = samples.iter().copied().fold(f64::INFINITY, f64::min);
        let most = samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        ensure!(ends == [least, most], "ends of {samples:?}: {ends:?}");
    }
    let none = Arm::new("none").median();
    ensure!(none.is_nan(), "median of no samples: {none}, want NaN");
    println!("ab: medians and quartiles are right");
    Ok(())
}
