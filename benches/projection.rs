//! Criterion benchmarks `fused_projection/arm/rows of xs`, where an arm is who multiplies, the type and the rows of the weight, with throughput in bytes of weights, so that a report reads as
//! bandwidth where few rows share them.
//!
//! `cargo bench --bench projection -- --save-baseline before`. To compare arms with each other use `--bench ab_projection`.

use std::time::Duration;

use candle::{DType, Device, Result, Tensor};
use criterion::{BenchmarkId, Criterion, Throughput};
use gem::qsa::QsaProjection;

fn random(rows: usize, scale: f32, dtype: DType) -> Result<Tensor> {
    Tensor::randn(0f32, scale, (rows, 2560), &Device::Cpu)?.to_dtype(dtype)
}

fn qsa(criterion: &mut Criterion) -> Result<()> {
    let mut group = criterion.benchmark_group("fused_projection");
    for (name, dtype) in [
        ("f32", DType::F32),
        ("f16", DType::F16),
        ("bf16", DType::BF16),
    ] {
        let weight = |rows| random(rows, 0.02, dtype);
        let projection =
            QsaProjection::new(&weight(512)?, &weight(512)?, &weight(128)?, &weight(512)?)?;
        for (query, columns) in [(false, 1152), (true, 1664)] {
            let arm = |arm: &str, rows| BenchmarkId::new(format!("{arm}-{name}-{columns}"), rows);
            let weight = projection.packed(query).weight();
            let bytes = weight.elem_count() * dtype.size_in_bytes();
            group.throughput(Throughput::Bytes(bytes as u64));
            for rows in [1, 8, 256, 2048] {
                let xs = random(rows, 1.0, dtype)?;
                group.bench_function(arm("fused", rows), |b| {
                    b.iter(|| projection.project(&xs, query))
                });
                let transposed = weight.t()?;
                group.bench_function(arm("candle", rows), |b| b.iter(|| xs.matmul(&transposed)));
            }
        }
    }
    group.finish();
    Ok(())
}

fn main() -> Result<()> {
    let mut criterion = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2))
        .configure_from_args();
    qsa(&mut criterion)?;
    criterion.final_summary();
    Ok(())
}
