//! What is compared.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{bail, Context, Result};
use candle::{DType, Device, Tensor};
use gem::attention::reference::{self, Visible};
use gem::attention::{CpuKernel, RotaryKeys, RotaryTables};
use gem::AttentionD512;
use rayon::prelude::*;

use crate::read::read;
use crate::samples::{timed, Run};

/// Gemma 4 has 1.0; with unit-normal inputs this one leaves a softmax that is not one-hot.
const SCALE: f32 = 0.044_194_174;

#[derive(Clone, Copy)]
pub struct Shape {
    pub dtype: DType,
    pub batch: usize,
    pub q_heads: usize,
    pub kv_heads: usize,
    pub q_len: usize,
    pub kv_len: usize,
}

impl Shape {
    pub fn kv_bytes(&self) -> usize {
        2 * self.batch * self.kv_heads * self.kv_len * 512 * self.dtype.size_in_bytes()
    }
}

pub struct Inputs {
    shape: Shape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    /// For the arms that rebuild keys from `v`: Gemma 4's rotation, whatever `k` holds.
    keys: RotaryKeys,
}

impl Inputs {
    pub fn new(shape: Shape) -> Result<Self> {
        let Shape {
            dtype,
            batch,
            q_heads,
            kv_heads,
            q_len,
            kv_len,
        } = shape;
        let random = |heads, len| {
            Tensor::randn(0f32, 1.0, (batch, heads, len, 512), &Device::Cpu)?.to_dtype(dtype)
        };
        let frequencies: Vec<f64> = (0..64)
            .map(|pair| 1e6f64.powf(-2.0 * pair as f64 / 512.0))
            .collect();
        let tables = RotaryTables::new(&frequencies, kv_len, &Device::Cpu)?;
        let weight = Tensor::rand(0.5f32, 1.5, 512, &Device::Cpu)?;
        Ok(Self {
            shape,
            keys: RotaryKeys::new(&weight, &tables)?,
            q: random(q_heads, q_len)?,
            k: random(kv_heads, kv_len)?,
            v: random(kv_heads, kv_len)?,
        })
    }
}

pub fn arm(name: &str, inputs: &Inputs, python: &str) -> Result<Run> {
    let (q, k, v) = (inputs.q.clone(), inputs.k.clone(), inputs.v.clone());
    let fused = |op: AttentionD512| -> Result<Run> {
        op.check(&q, &k, &v)?;
        let (q, k, v) = (q.clone(), k.clone(), v.clone());
        Ok(timed(move || Ok(op.forward(&q, &k, &v)?)))
    };
    let op = AttentionD512::new(SCALE);
    match name {
        "fused-kv" => {
            let keys = inputs.keys.clone();
            op.check_shared_kv(&q, &v, &keys)?;
            Ok(timed(move || Ok(op.forward_shared_kv(&q, &v, &keys)?)))
        }
        "limit-v" => Ok(timed(move || read(&v))),
        "limit" => Ok(timed(move || read(&k).and(read(&v)))),
        "products" => {
            let shape = inputs.shape;
            let pairs = shape.batch * shape.q_heads * shape.kv_len;
            Ok(timed(move || products(2 * pairs * 512)))
        }
        "fused" => fused(op),
        "fused-avx512" => fused(op.cpu_kernel(CpuKernel::Avx512)),
        "fused-avx2" => fused(op.cpu_kernel(CpuKernel::Avx2)),
        "fused-portable" => fused(op.cpu_kernel(CpuKernel::Portable)),
        "fused-aligned" => {
            let (q, k, v) = (q.clone(), aligned(&k)?, aligned(&v)?);
            Ok(timed(move || Ok(op.forward(&q, &k, &v)?)))
        }
        "grouped" => Ok(timed(move || grouped(&q, &k, &v))),
        "repeat_kv" => Ok(timed(move || {
            let group = q.dim(1)? / k.dim(1)?;
            let repeat = |t: &Tensor| candle_transformers::utils::repeat_kv(t.clone(), group);
            grouped(&q, &repeat(&k)?, &repeat(&v)?)
        })),
        "torch" | "torch-sdpa" => torch(name, inputs.shape, python),
        other => match other.strip_prefix("fused-p").map(str::parse) {
            Some(Ok(partitions)) => fused(op.partitions(partitions)),
            _ => bail!("unknown arm {other}"),
        },
    }
}

/// A copy that starts on a cache line: a view at an offset into a slightly larger buffer.
fn aligned(t: &Tensor) -> Result<Tensor> {
    let padding = Tensor::zeros(32, t.dtype(), t.device())?;
    let buffer = Tensor::cat(&[&padding, &t.flatten_all()?, &padding], 0)?;
    let address = {
        let (storage, _) = buffer.storage_and_layout();
        match &*storage {
            candle::Storage::Cpu(candle::CpuStorage::F32(s)) => s.as_ptr() as usize,
            candle::Storage::Cpu(candle::CpuStorage::F16(s)) => s.as_ptr() as usize,
            candle::Storage::Cpu(candle::CpuStorage::BF16(s)) => s.as_ptr() as usize,
            _ => bail!("fused-aligned: no f32, f16 or bf16 tensor on the CPU"),
        }
    };
    let offset = (address.next_multiple_of(64) - address) / t.dtype().size_in_bytes();
    Ok(buffer
        .narrow(0, offset, t.elem_count())?
        .reshape(t.shape())?)
}

/// Does nothing but as many f32 multiply-adds as a decode needs, on all threads, out of registers.
#[cfg(target_arch = "x86_64")]
fn products(multiply_adds: usize) -> Result<()> {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    fn run(vectors: usize) -> f32 {
        let (x, y) = (_mm256_set1_ps(0.9999), _mm256_set1_ps(0.5));
        let mut acc = [y; 12];
        for _ in 0..std::hint::black_box(vectors / 12) {
            for acc in &mut acc {
                *acc = _mm256_fmadd_ps(*acc, x, y);
            }
        }
        acc.iter().map(|acc| _mm256_cvtss_f32(*acc)).sum()
    }
    if !CpuKernel::Avx2.is_available() {
        bail!("products: needs AVX2 and FMA");
    }
    let parts = 4 * rayon::current_num_threads();
    (0..parts).into_par_iter().for_each(|_| {
        // SAFETY: the CPU has AVX2 and FMA.
        std::hint::black_box(unsafe { run(multiply_adds / 8 / parts) });
    });
    Ok(())
}

#[cfg(not(target_arch = "x86_64"))]
fn products(_: usize) -> Result<()> {
    bail!("products: only written for x86-64")
}

/// The reference path: candle's plain ops, query heads as rows against the cache as it is, softmax in f32.
fn grouped(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let first_query = k.dim(2)? - q.dim(2)?;
    let visible = match q.dim(2)? {
        1 => Visible::All,
        _ => Visible::Causal {
            first_query,
            first_key: 0,
            window: None,
        },
    };
    Ok(reference::attention(q, k, v, SCALE, visible)?)
}

/// A Python process that holds its own tensors of the same shape and times itself when asked.
fn torch(arm: &str, shape: Shape, python: &str) -> Result<Run> {
    // In the repository, where cargo runs benchmarks.
    let script = "benches/torch_peer.py";
    let mut child = Command::new(python)
        .arg(script)
        .arg(arm)
        .arg(format!("{:?}", shape.dtype).to_lowercase())
        .args(
            [
                shape.batch,
                shape.q_heads,
                shape.kv_heads,
                shape.q_len,
                shape.kv_len,
                rayon::current_num_threads(),
            ]
            .map(|n| n.to_string()),
        )
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("{python} cannot be started"))?;
    let mut input = child.stdin.take().context("no stdin")?;
    let mut output = BufReader::new(child.stdout.take().context("no stdout")?);
    Ok(Box::new(move |n| {
        writeln!(input, "{n}")?;
        input.flush()?;
        let mut line = String::new();
        output.read_line(&mut line)?;
        // Its threads spin for a while after the work; the next arm must not pay for that.
        std::thread::sleep(Duration::from_millis(300));
        line.trim().parse().with_context(|| {
            format!(
                "the torch peer said {line:?}, status {:?}",
                child.try_wait()
            )
        })
    }))
}
