//! Samples, the table printed from them and the JSON that keeps them.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::samples;

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

    pub fn median(&self) -> f64 {
        samples::median(&self.ms)
    }
}

pub const HEADER: &str = "\
| dtype | q_len | keys | arm | median ms | least ms | ± % | GB/s of K+V | x limit | x fused |
|---|---:|---:|---|---:|---:|---:|---:|---:|---:|";

impl Case {
    pub fn arm(&self, name: &str) -> Option<&Arm> {
        self.arms.iter().find(|arm| arm.name == name)
    }

    /// The median over rounds.
    pub fn ratio(&self, arm: &Arm, to: &str) -> Option<f64> {
        let ratios = samples::ratios(&arm.ms, &self.arm(to)?.ms);
        Some(samples::median(&ratios))
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
                samples::quantile(&arm.ms, 0.0),
                100.0 * samples::spread(&arm.ms),
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
