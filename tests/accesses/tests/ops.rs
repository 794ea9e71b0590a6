//! Every op at its smallest, so that a tool that watches each access gets through: each type, row counts around the tiles,
//! views of larger buffers. What comes out is compared with the definition, loosely: the tool judges the accesses.

use candle::{DType, Device, Result, Tensor};
use gem::attention::{CpuKernel, RotaryKeys, RotaryTables};
use gem::{attention_d512_shared_kv, AttentionD512, AttentionPartials, FusedProjection};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Values in -1..1, none of which a half type rounds.
fn made(seed: usize, shape: &[usize], dtype: DType) -> Result<Tensor> {
    let len = shape.iter().product();
    let value = |i: usize| ((i * 2654435761 + seed * 97) >> 7) as u8 as i8 as f32 / 128.0;
    Tensor::from_vec((0..len).map(value).collect(), shape, &Device::Cpu)?.to_dtype(dtype)
}

/// The last rows of a larger buffer.
fn view(seed: usize, heads: usize, rows: usize, dtype: DType) -> Result<Tensor> {
    made(seed, &[1, heads, rows + 2, 512], dtype)?.narrow(2, 2, rows)
}

fn values(t: &Tensor) -> Result<Vec<f32>> {
    t.to_dtype(DType::F32)?.flatten_all()?.to_vec1()
}

/// Softmax of the scores over the keys up to each row's own, in f64.
fn definition(q: &Tensor, k: &Tensor, v: &Tensor, scale: f64) -> Result<Vec<f64>> {
    let (heads, rows, keys) = (q.dim(1)?, q.dim(2)?, k.dim(2)?);
    let group = heads / k.dim(1)?;
    let [q, k, v] = [values(q)?, values(k)?, values(v)?];
    let mut out = vec![];
    for (i, q) in q.chunks(512).enumerate() {
        let head = i / rows / group * keys;
        let seen = head..head + keys - rows + i % rows + 1;
        let row = |all: &[f32], t: usize| all[512 * t..512 * (t + 1)].to_vec();
        let dot = |t| {
            q.iter()
                .zip(row(&k, t))
                .map(|(a, b)| *a as f64 * b as f64)
                .sum::<f64>()
        };
        let weights: Vec<f64> = seen.clone().map(|t| (dot(t) * scale).exp()).collect();
        let sum: f64 = weights.iter().sum();
        let mut mean = vec![0.0; 512];
        for (t, weight) in seen.zip(&weights) {
            let add = |(to, x): (&mut f64, f32)| *to += weight / sum * x as f64;
            mean.iter_mut().zip(row(&v, t)).for_each(add);
        }
        out.extend(mean);
    }
    Ok(out)
}

fn assert_near(got: &Tensor, want: &[f64], bound: f64) -> Result<()> {
    let got = values(got)?;
    assert_eq!(got.len(), want.len());
    for (got, want) in got.iter().zip(want) {
        assert!((*got as f64 - want).abs() < bound, "{got}, want {want}");
    }
    Ok(())
}

fn kernels() -> impl Iterator<Item = CpuKernel> {
    CpuKernel::ALL
        .into_iter()
        .filter(|kernel| kernel.is_available())
}

#[test]
fn attention() -> Result<()> {
    for (i, dtype) in TYPES.into_iter().enumerate() {
        for (rows, keys, partitions) in [(1, 5, 2), (3, 4, 1)] {
            let (q, k) = (
                view(1, 4, rows, dtype)?,
                view(2, 2, keys, TYPES[(i + 1) % 3])?,
            );
            let v = view(3, 2, keys, dtype)?;
            let want = definition(&q, &k, &v, 0.05)?;
            for kernel in kernels() {
                let op = AttentionD512::new(0.05)
                    .partitions(partitions)
                    .cpu_kernel(kernel);
                assert_near(&op.forward(&q, &k, &v)?, &want, 1e-2)?;
            }
        }
    }
    Ok(())
}

#[test]
fn states() -> Result<()> {
    let (q, k, v) = (
        view(1, 2, 1, DType::F32)?,
        view(2, 1, 6, DType::F32)?,
        view(3, 1, 6, DType::F32)?,
    );
    let op = AttentionD512::new(0.05);
    let part = |first, len| op.partials(&q, &k.narrow(2, first, len)?, &v.narrow(2, first, len)?);
    let merged = AttentionPartials::merge(&[part(0, 2)?, part(2, 4)?])?;
    assert_near(
        &merged.finish(DType::F32)?,
        &definition(&q, &k, &v, 0.05)?,
        1e-5,
    )?;
    assert!(values(&merged.log_sum_exp()?)?
        .iter()
        .all(|x| x.is_finite()));
    Ok(())
}

#[test]
fn attention_with_keys_of_values() -> Result<()> {
    let tables = RotaryTables::new(&[1.0, 0.5], 5, &Device::Cpu)?;
    let keys = RotaryKeys::new(&made(4, &[512], DType::F32)?, &tables)?;
    for dtype in TYPES {
        let (q, v) = (view(1, 4, 2, DType::F32)?, view(2, 2, 5, dtype)?);
        let out = values(&attention_d512_shared_kv(&q, &v, &keys, 0.05)?)?;
        // An average of values of at most 1.
        assert!(out.iter().all(|x| x.abs() <= 1.0) && out.iter().any(|x| *x != 0.0));
    }
    Ok(())
}

#[test]
fn projection() -> Result<()> {
    for dtype in TYPES {
        let blocks = [made(1, &[3, 37], dtype)?, made(2, &[9, 37], dtype)?];
        let packed = FusedProjection::pack(&[("a", &blocks[0]), ("b", &blocks[1])])?;
        for rows in [1, 5] {
            let xs = made(5, &[rows, 37], DType::F32)?;
            let (x, w) = (values(&xs)?, values(&Tensor::cat(&blocks, 0)?)?);
            let products = x.chunks(37).flat_map(|x| {
                let dot = |w: &[f32]| x.iter().zip(w).map(|(a, b)| *a as f64 * *b as f64).sum();
                w.chunks(37).map(dot).collect::<Vec<f64>>()
            });
            let want: Vec<f64> = products.collect();
            for kernel in gem::projection::CpuKernel::ALL {
                if kernel.is_available() {
                    let projection = packed.clone().cpu_kernel(kernel);
                    assert_near(projection.forward(&xs)?.packed(), &want, 1e-5)?;
                }
            }
        }
    }
    Ok(())
}
