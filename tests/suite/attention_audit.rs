//! The accuracy audit: every kernel against direct softmax in f64 at five lengths, with a receipt.
//!
//! `cargo test --release -- --ignored --exact attention_audit::accuracy_at_the_five_lengths --nocapture`

use std::path::PathBuf;

use candle::{Device, Result, Tensor};
use gem::attention::CpuKernel;
use gem::AttentionD512;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::attention_support::{bits, flat, oracle, SCALE};

const LENGTHS: [usize; 5] = [8191, 8192, 8193, 65_536, 131_072];
const Q_HEADS: usize = 8;
const PARTITIONS: usize = 32;
const THRESHOLDS: Thresholds = Thresholds {
    least_correlation: 0.999_999_999_999,
    most_nmse: 1.42e-11,
    max_abs_error_below: 1.64e-7,
};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Receipt {
    q_heads: usize,
    kv_heads: usize,
    head_dim: usize,
    partitions: usize,
    softmax_scale: f32,
    thresholds: Thresholds,
    cases: Vec<Case>,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Thresholds {
    least_correlation: f64,
    most_nmse: f64,
    max_abs_error_below: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    kernel: String,
    kv_len: usize,
    seed: u64,
    sha256_q: String,
    sha256_k: String,
    sha256_v: String,
    sha256_output: String,
    correlation: f64,
    nmse: f64,
    max_abs_error: f64,
    finite: bool,
    repeats_bit_for_bit: bool,
}

/// Uniform values of unit variance.
fn uniform(seed: u64, heads: usize, len: usize) -> Result<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let width = 12f32.sqrt() / (1u32 << 24) as f32;
    let values: Vec<f32> = (0..heads * len * 512)
        .map(|_| ((rng.next_u32() >> 8) as f32 - (1u32 << 23) as f32) * width)
        .collect();
    Tensor::from_vec(values, (1, heads, len, 512), &Device::Cpu)
}

fn inputs(seed: u64, kv_len: usize) -> Result<[Tensor; 3]> {
    Ok([
        uniform(seed, Q_HEADS, 1)?,
        uniform(seed + 1, 1, kv_len)?,
        uniform(seed + 2, 1, kv_len)?,
    ])
}

fn sha256(t: &Tensor) -> Result<String> {
    let mut hasher = Sha256::new();
    flat(t)?.iter().for_each(|x| hasher.update(x.to_le_bytes()));
    Ok(hasher
        .finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect())
}

fn measure(
    kernel: CpuKernel,
    kv_len: usize,
    [q, k, v]: &[Tensor; 3],
    want: &[f64],
) -> Result<Case> {
    let op = AttentionD512::new(SCALE)
        .partitions(PARTITIONS)
        .cpu_kernel(kernel);
    let got = op.forward(q, k, v)?;
    let again = op.forward(q, k, v)?;
    let values: Vec<f64> = flat(&got)?.into_iter().map(f64::from).collect();
    let sum =
        |f: &dyn Fn(f64, f64) -> f64| values.iter().zip(want).map(|(a, b)| f(*a, *b)).sum::<f64>();
    let n = values.len() as f64;
    let (mean_a, mean_b) = (sum(&|a, _| a) / n, sum(&|_, b| b) / n);
    let covariance = sum(&|a, b| (a - mean_a) * (b - mean_b));
    let variances = sum(&|a, _| (a - mean_a).powi(2)) * sum(&|_, b| (b - mean_b).powi(2));
    Ok(Case {
        kernel: format!("{kernel:?}"),
        kv_len,
        seed: kv_len as u64,
        sha256_q: sha256(q)?,
        sha256_k: sha256(k)?,
        sha256_v: sha256(v)?,
        sha256_output: sha256(&got)?,
        correlation: covariance / variances.sqrt(),
        nmse: sum(&|a, b| (a - b).powi(2)) / sum(&|_, b| b * b),
        max_abs_error: values
            .iter()
            .zip(want)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f64::max),
        finite: values.iter().all(|x| x.is_finite()),
        repeats_bit_for_bit: bits(&got)? == bits(&again)?,
    })
}

/// Refuses a receipt that is not exactly what the contract asks for; says why.
fn check(text: &str) -> std::result::Result<Receipt, String> {
    let receipt: Receipt = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let head = Receipt {
        cases: Vec::new(),
        ..receipt.clone()
    };
    if head != empty_receipt() {
        return Err(format!(
            "the geometry or the thresholds are not the contract's: {head:?}"
        ));
    }
    let kernels: std::collections::BTreeSet<&str> =
        receipt.cases.iter().map(|c| c.kernel.as_str()).collect();
    if !kernels.contains("Portable") {
        return Err("there is no case of the portable kernel".to_string());
    }
    for kernel in &kernels {
        let cases = receipt.cases.iter().filter(|c| c.kernel == *kernel);
        let lengths: Vec<usize> = cases.map(|c| c.kv_len).collect();
        if lengths != LENGTHS {
            return Err(format!(
                "{kernel} has cases for {lengths:?}, want {LENGTHS:?}"
            ));
        }
    }
    for case in &receipt.cases {
        let digests = [
            &case.sha256_q,
            &case.sha256_k,
            &case.sha256_v,
            &case.sha256_output,
        ];
        let hex = |s: &String| s.len() == 64 && s.bytes().all(|b| b.is_ascii_hexdigit());
        // Written so that a NaN fails.
        let passes = case.correlation >= THRESHOLDS.least_correlation
            && case.correlation <= 1.0 + 1e-12
            && (0.0..=THRESHOLDS.most_nmse).contains(&case.nmse)
            && (0.0..THRESHOLDS.max_abs_error_below).contains(&case.max_abs_error)
            && case.finite
            && case.repeats_bit_for_bit
            && case.seed == case.kv_len as u64
            && digests.into_iter().all(hex);
        if !passes {
            return Err(format!("a case fails: {case:?}"));
        }
    }
    Ok(receipt)
}

fn empty_receipt() -> Receipt {
    Receipt {
        q_heads: Q_HEADS,
        kv_heads: 1,
        head_dim: 512,
        partitions: PARTITIONS,
        softmax_scale: SCALE,
        thresholds: THRESHOLDS,
        cases: Vec::new(),
    }
}

fn committed() -> String {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/docs/receipts/attention-audit.json"
    );
    std::fs::read_to_string(path).unwrap()
}

#[test]
#[ignore = "reads 1.1 GB and takes about a minute"]
fn accuracy_at_the_five_lengths() -> Result<()> {
    let kernels: Vec<CpuKernel> = CpuKernel::ALL
        .into_iter()
        .filter(|k| k.is_available())
        .collect();
    let mut receipt = empty_receipt();
    for kv_len in LENGTHS {
        let inputs = inputs(kv_len as u64, kv_len)?;
        let [q, k, v] = &inputs;
        let want = oracle(q, k, v, SCALE as f64, true)?;
        for kernel in &kernels {
            receipt
                .cases
                .push(measure(*kernel, kv_len, &inputs, &want)?);
        }
    }
    receipt
        .cases
        .sort_by(|a, b| (&a.kernel, a.kv_len).cmp(&(&b.kernel, b.kv_len)));
    let text = serde_json::to_string_pretty(&receipt).map_err(candle::Error::wrap)? + "\n";
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("attention-audit.json");
    std::fs::write(&path, &text)?;
    println!("{text}written to {}", path.display());
    check(&text).map_err(candle::Error::msg)?;
    Ok(())
}

#[test]
fn the_committed_receipt_passes_and_is_bound_to_inputs_that_can_be_made_again() -> Result<()> {
    let receipt = check(&committed()).map_err(candle::Error::msg)?;
    for case in receipt.cases.iter().filter(|case| case.kv_len == 8193) {
        let [q, k, v] = inputs(case.seed, case.kv_len)?;
        assert_eq!(sha256(&q)?, case.sha256_q);
        assert_eq!(sha256(&k)?, case.sha256_k);
        assert_eq!(sha256(&v)?, case.sha256_v);
    }
    Ok(())
}

#[test]
fn a_receipt_with_any_field_missing_or_failing_is_refused() {
    let good: serde_json::Value = serde_json::from_str(&committed()).unwrap();
    let refused = |value: &serde_json::Value| check(&value.to_string()).is_err();
    assert!(!refused(&good));
    let fields = |value: &serde_json::Value| -> Vec<String> {
        value.as_object().unwrap().keys().cloned().collect()
    };
    for pointer in ["", "/thresholds", "/cases/0", "/cases/7"] {
        for field in fields(good.pointer(pointer).unwrap()) {
            let mut missing = good.clone();
            let object = missing
                .pointer_mut(pointer)
                .unwrap()
                .as_object_mut()
                .unwrap();
            object.remove(&field);
            assert!(refused(&missing), "{pointer}/{field} missing");
        }
    }
    let failing = [
        ("/q_heads", serde_json::json!(4)),
        ("/partitions", serde_json::json!(1)),
        ("/thresholds/most_nmse", serde_json::json!(1.0)),
        ("/cases/3/kernel", serde_json::json!("Other")),
        ("/cases/3/kv_len", serde_json::json!(8192)),
        ("/cases/3/seed", serde_json::json!(1)),
        ("/cases/3/sha256_k", serde_json::json!("")),
        ("/cases/3/correlation", serde_json::json!(0.999_999_9)),
        ("/cases/3/correlation", serde_json::json!(null)),
        ("/cases/3/nmse", serde_json::json!(1.5e-11)),
        ("/cases/3/nmse", serde_json::json!(-1.0)),
        ("/cases/3/max_abs_error", serde_json::json!(1.7e-7)),
        ("/cases/3/finite", serde_json::json!(false)),
        ("/cases/3/repeats_bit_for_bit", serde_json::json!(false)),
        ("/cases/3", good["cases"][4].clone()),
    ];
    for (pointer, value) in failing {
        let mut bad = good.clone();
        *bad.pointer_mut(pointer).unwrap() = value.clone();
        assert!(refused(&bad), "{pointer} = {value}");
    }
    let mut unknown = good.clone();
    unknown["cases"][0]["note"] = serde_json::json!("");
    assert!(refused(&unknown));
}
