//! Cases, the table printed from them and the JSON that keeps them.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::samples::{Arm, Origin};

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

pub const HEADER: &str = "\
| dtype | q_len | keys | arm | median ms | least ms | ± % | GB/s of K+V | x limit | x fused |
|---|---:|---:|---|---:|---:|---:|---:|---:|---:|";

impl Case {
    pub fn arm(&self, name: &str) -> Option<&Arm> {
        self.arms.iter().find(|arm| arm.name == name)
    }

    /// [`Arm::ratio`], if the other arm ran.
    pub fn ratio(&self, arm: &Arm, to: &str) -> Option<f64> {
        Some(arm.ratio(self.arm(to)?))
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
        let origin = Origin::of("ab");
        Self {
            machine: origin.machine,
            threads: origin.threads,
            commit: origin.commit,
            date: origin.date,
            command: origin.command,
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
