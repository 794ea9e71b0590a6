//! Samples, the table printed from them and the JSON that keeps them.

use std::path::Path;
use std::process::Command;

use anyhow::{ensure, Context, Result};
use serde::{Deserialize, Serialize};

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Receipt {
    pub machine: String,
    pub threads: usize,
    pub commit: String,
    pub date: String,
    pub command: String,
    pub cases: Vec<Case>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub dtype: String,
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_len: usize,
    pub kv_len: usize,
    pub kv_bytes: usize,
    pub arms: Vec<Arm>,
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

    /// Between two samples the quantile is interpolated, so the median of an even number is the mean of the middle two.
    fn quantile(&self, at: f64) -> f64 {
        let mut ms = self.ms.clone();
        ms.sort_by(f64::total_cmp);
        let Some(last) = ms.len().checked_sub(1) else {
            return f64::NAN;
        };
        let place = last as f64 * at;
        let below = place as usize;
        let above = (below + 1).min(last);
        ms[below] + (ms[above] - ms[below]) * (place - below as f64)
    }

    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// Half the distance between the quartiles, relative to the median.
    fn spread(&self) -> f64 {
        (self.quantile(0.75) - self.quantile(0.25)) / 2.0 / self.median()
    }
}

pub const HEADER: &str = "\
| dtype | q_len | keys | arm | median ms | least ms | ± % | GB/s of K+V | x limit | x fused |
|---|---:|---:|---|---:|---:|---:|---:|---:|---:|";

impl Case {
    pub fn arm(&self, name: &str) -> Option<&Arm> {
        self.arms.iter().find(|arm| arm.name == name)
    }

    /// The median over rounds of this arm's time by the other's in the same round: drift of the machine cancels.
    pub fn ratio(&self, arm: &Arm, to: &str) -> Option<f64> {
        let to = self.arm(to)?;
        let mut ratios = Arm::new("ratio");
        ratios.ms = arm.ms.iter().zip(&to.ms).map(|(a, b)| a / b).collect();
        Some(ratios.median())
    }

    pub fn print(&self) {
        for arm in &self.arms {
            let ratio = |to| match self.ratio(arm, to) {
                Some(ratio) => format!("{ratio:.2}"),
                None => String::new(),
            };
            println!(
                "| {} | {} | {} | {} | {:.4} | {:.4} | {:.1} | {:.1} | {} | {} |",
                self.dtype,
                self.q_len,
                self.kv_len,
                arm.name,
                arm.median(),
                arm.quantile(0.0),
                100.0 * arm.spread(),
                self.kv_bytes as f64 / arm.median() / 1e6,
                ratio("limit"),
                ratio("fused"),
            );
        }
    }
}

impl Receipt {
    pub fn new() -> Self {
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
                "cargo bench --bench ab -- {}",
                command.map(folderless).collect::<Vec<_>>().join(" ")
            ),
            cases: Vec::new(),
        }
    }

    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_str(&text).with_context(|| format!("{} is no receipt", path.display()))
    }

    pub fn write(&self, path: &Path) -> Result<()> {
        std::fs::write(path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))
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
