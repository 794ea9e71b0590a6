//! Receipts: what a gate measured, bound to the kernels that were built and to the receipts before it.
//!
//! A digest tells an edited receipt from the one that was written. It is no signature: whoever can run this program can make
//! receipts, of whatever machine.

use crate::bounded_file;
use crate::replace::Replacement;
use crate::sources::CPU;
use anyhow::{bail, Context, Result};
use gem::backend::plan::Source;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};

/// Bytes of a receipt.
const LARGEST: u64 = 64 << 20;

/// What a gate leaves behind, and what it takes to pass.
pub trait Report: Serialize + DeserializeOwned {
    /// Name of the gate and of its file.
    const GATE: &'static str;

    /// Everything that is wrong or missing; nothing for a pass. Also decides about a report that is read back, so it must not
    /// trust it.
    fn refusals(&self, settings: &Settings) -> Vec<String>;

    /// One line for the table.
    fn summary(&self) -> String;
}

/// What all receipts of a run have in common.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Settings {
    pub version: String,
    /// `cpu`, `metal` or `cuda`.
    pub device: String,
    /// Operating system and architecture.
    pub machine: String,
    pub threads: usize,
    pub quick: bool,
    pub seed: u64,
    /// SHA-256 of each kernel source, with its header, by file.
    pub kernels: BTreeMap<String, String>,
}

impl std::fmt::Display for Settings {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let Self {
            version,
            device,
            machine,
            threads,
            seed,
            ..
        } = self;
        let length = if self.quick { "quick" } else { "full" };
        write!(
            f,
            "verify {version}, {length}, {device} of {machine}, {threads} threads, seed {seed}"
        )
    }
}

impl Settings {
    pub fn new(device: &candle::Device, quick: bool, seed: u64) -> Self {
        let name = match device {
            candle::Device::Cpu => "cpu",
            candle::Device::Metal(_) => "metal",
            candle::Device::Cuda(_) => "cuda",
        };
        Self {
            version: env!("CARGO_PKG_VERSION").to_string(),
            device: name.to_string(),
            machine: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            threads: rayon::current_num_threads(),
            quick,
            seed,
            kernels: kernels(),
        }
    }

    fn check(&self) -> Result<()> {
        if self.version != env!("CARGO_PKG_VERSION") {
            bail!(
                "is of version {}, this program is {}",
                self.version,
                env!("CARGO_PKG_VERSION")
            );
        }
        for (file, digest) in kernels() {
            if self.kernels.get(&file) != Some(&digest) {
                bail!("is of another {file} than the one in this program");
            }
        }
        if self.kernels.len() != kernels().len() {
            bail!("names kernels that this program does not have");
        }
        Ok(())
    }
}

fn kernels() -> BTreeMap<String, String> {
    let gpu = Source::METAL.into_iter().chain(Source::CUDA);
    let gpu = gpu.map(|source| (source.file().to_string(), source.digest()));
    let cpu = CPU.map(|(path, text)| (path.to_string(), sha256(text.as_bytes())));
    gpu.chain(cpu).collect()
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Receipt<R> {
    gate: String,
    settings: Settings,
    /// Digest of the receipt before, empty for the first.
    previous: String,
    report: R,
    /// SHA-256 of this file with 64 zeros here.
    sha256: String,
}

/// The receipts of one run, in order.
pub struct Receipts {
    folder: PathBuf,
    pub settings: Settings,
    previous: String,
    count: usize,
}

/// A line of the table.
pub struct Verdict {
    pub summary: String,
    pub refusals: Vec<String>,
}

impl Receipts {
    /// Starts an empty set in `folder`, which may not hold an older one.
    pub fn create(folder: &Path, settings: Settings) -> Result<Self> {
        std::fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == "json") {
                bail!(
                    "{} is there already, want a folder without receipts",
                    path.display()
                );
            }
        }
        Ok(Self::at(folder, settings))
    }

    /// The set that is in `folder`.
    pub fn open(folder: &Path) -> Result<Self> {
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let path = entry?.path();
            let known = crate::GATES.iter().enumerate().any(|(i, gate)| {
                path.file_name() == Some(format!("{}-{gate}.json", i + 1).as_ref())
            });
            if !known {
                bail!("{} is no receipt of a gate", path.display());
            }
        }
        let first = format!("1-{}.json", crate::FIRST_GATE);
        let path = folder.join(first);
        let text = text_of(&path)?;
        let receipt: Receipt<serde_json::Value> =
            serde_json::from_str(&text).with_context(|| path.display().to_string())?;
        receipt
            .settings
            .check()
            .with_context(|| path.display().to_string())?;
        Ok(Self::at(folder, receipt.settings))
    }

    fn at(folder: &Path, settings: Settings) -> Self {
        Self {
            folder: folder.to_path_buf(),
            settings,
            previous: String::new(),
            count: 0,
        }
    }

    fn next_path<R: Report>(&self) -> PathBuf {
        self.folder
            .join(format!("{}-{}.json", self.count + 1, R::GATE))
    }

    /// Keeps the next report, whatever it says.
    pub fn write<R: Report>(&mut self, report: R) -> Result<Verdict> {
        let verdict = self.judge(&report);
        let path = self.next_path::<R>();
        let mut receipt = Receipt {
            gate: R::GATE.to_string(),
            settings: self.settings.clone(),
            previous: self.previous.clone(),
            report,
            sha256: "0".repeat(64),
        };
        let blank = serde_json::to_string_pretty(&receipt)? + "\n";
        receipt.sha256 = sha256(blank.as_bytes());
        let text = serde_json::to_string_pretty(&receipt)? + "\n";
        let mut file = Replacement::of(&path, "receipt", |_| true)?;
        file.write_all(text.as_bytes())?;
        file.put()?;
        self.previous = receipt.sha256;
        self.count += 1;
        Ok(verdict)
    }

    /// Reads the next report back and judges it again.
    pub fn check<R: Report>(&mut self) -> Result<Verdict> {
        let path = self.next_path::<R>();
        let (report, digest) = self
            .read::<R>(&path)
            .with_context(|| path.display().to_string())?;
        self.previous = digest;
        self.count += 1;
        Ok(self.judge(&report))
    }

    fn read<R: Report>(&self, path: &Path) -> Result<(R, String)> {
        let text = text_of(path)?;
        let receipt: Receipt<R> = serde_json::from_str(&text)?;
        let field = |digest: &str| format!("\"sha256\": \"{digest}\"\n}}\n");
        let Some(body) = text.strip_suffix(&field(&receipt.sha256)) else {
            bail!("does not end with its digest");
        };
        let blank = format!("{body}{}", field(&"0".repeat(64)));
        if sha256(blank.as_bytes()) != receipt.sha256 {
            bail!("was edited: its digest is another");
        }
        if receipt.gate != R::GATE {
            bail!("is a receipt of {}, want one of {}", receipt.gate, R::GATE);
        }
        if receipt.previous != self.previous {
            bail!("does not follow the receipt before it");
        }
        if receipt.settings != self.settings {
            bail!("was made with other settings than the first receipt");
        }
        Ok((receipt.report, receipt.sha256))
    }

    fn judge<R: Report>(&self, report: &R) -> Verdict {
        Verdict {
            summary: report.summary(),
            refusals: report.refusals(&self.settings),
        }
    }
}

pub fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn text_of(receipt: &Path) -> Result<String> {
    let text = bounded_file::read(receipt, LARGEST)?;
    text.with_context(|| format!("{}: there is no such file", receipt.display()))
}
