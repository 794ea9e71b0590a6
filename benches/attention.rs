//! Criterion benchmarks `attention_d512/arm/length`, with throughput in the bytes of the cache, so that a report reads as bandwidth.
//!
//! `cargo bench --bench attention -- --save-baseline before`. To compare arms with each other use `--bench ab`.

use std::time::Duration;

use candle::{DType, Device, Result, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput};
use gem::attention::reference::{self, Visible};
use gem::attention::{RotaryKeys, RotaryTables};
use gem::AttentionD512;

const SCALE: f32 = 0.044_194_174;
const Q_HEADS: usize = 32;
const KV_HEADS: usize = 4;

fn random(heads: usize, len: usize, dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, (1, heads, len, 512), &Device::Cpu)?.to_dtype(dtype)
}

fn decode(criterion: &mut Criterion) -> Result<()> {
    let mut group = criterion.benchmark_group("attention_d512");
    for (name, dtype) in [
        ("f32", DType::F32),
        ("f16", DType::F16),
        ("bf16", DType::BF16),
    ] {
        let arm = |arm: &str, len| BenchmarkId::new(format!("{arm}-{name}"), len);
        for len in [128, 1024, 8192, 65_536] {
            let q = random(Q_HEADS, 1, dtype)?;
            let (k, v) = (random(KV_HEADS, len, dtype)?, random(KV_HEADS, len, dtype)?);
            let op = AttentionD512::new(SCALE);
            let geometry = op.check(&q, &k, &v)?;
            group.throughput(Throughput::Bytes(geometry.kv_bytes()));
            group.bench_function(arm("fused", len), |b| b.iter(|| op.forward(&q, &k, &v)));
            if len <= 8192 {
                group.bench_function(arm("reference", len), |b| {
                    b.iter(|| reference::attention(&q, &k, &v, SCALE, Visible::All))
                });
            }
            // Of values alone.
            group.throughput(Throughput::Bytes(geometry.kv_bytes() / 2));
            let keys = rotary_keys(len)?;
            group.bench_function(arm("fused-kv", len), |b| {
                b.iter(|| op.forward_shared_kv(&q, &v, &keys))
            });
        }
    }
    group.finish();
    Ok(())
}

/// Those of Gemma 4: 64 pairs of dimensions turn.
fn rotary_keys(positions: usize) -> Result<RotaryKeys> {
    let frequencies: Vec<f64> = (0..64)
        .map(|i| 1e6f64.powf(-2.0 * f64::from(i) / 512.0))
        .collect();
    let weight = Tensor::ones(512, DType::F32, &Device::Cpu)?;
    RotaryKeys::new(
        &weight,
        &RotaryTables::new(&frequencies, positions, &Device::Cpu)?,
    )
}

fn main() -> Result<()> {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    decode(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}
