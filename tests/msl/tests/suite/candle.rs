//! candle's kernels, unmodified, against double precision: code that this project did not write.

use crate::decode::{compile as compile_sdpa, Decode, DIM};
use crate::reference::{matmul, max_error, softmax, to_f16, uniform, widen};
use half::f16;
use msl::{candle_kernels, Buffer, Constant, Dispatch, Mode, Module, Result, SEEDS};

fn compile(file: &str, entries: &[&str], mode: Mode) -> Module {
    let text = candle_kernels(file).unwrap();
    Module::compile(&[(file, &text)], entries, mode).unwrap()
}

fn random(heads: usize, kv_heads: usize, tokens: usize) -> Decode {
    Decode {
        heads,
        kv_heads,
        tokens,
        scale: 0.17,
        q: uniform(1, heads * DIM),
        k: uniform(2, kv_heads * tokens * DIM),
        v: uniform(3, kv_heads * tokens * DIM),
    }
}

fn want(decode: &Decode) -> Vec<f64> {
    let mut out = vec![0.0; decode.heads * DIM];
    for head in 0..decode.heads {
        let first = head / (decode.heads / decode.kv_heads) * decode.tokens;
        let rows = |x: &'_ [f32], i: usize| x[(first + i) * DIM..][..DIM].to_vec();
        let q = &decode.q[head * DIM..][..DIM];
        let scores: Vec<f64> = (0..decode.tokens)
            .map(|i| {
                let dot: f64 = widen(q)
                    .zip(widen(&rows(&decode.k, i)))
                    .map(|(a, b)| a * b)
                    .sum();
                dot * f64::from(decode.scale)
            })
            .collect();
        for (i, weight) in softmax(&scores).iter().enumerate() {
            let row = rows(&decode.v, i);
            for (o, v) in out[head * DIM..][..DIM].iter_mut().zip(widen(&row)) {
                *o += weight * v;
            }
        }
    }
    out
}

#[test]
fn decode_attention_agrees_with_double_precision_in_every_schedule() {
    let module = compile_sdpa(Mode::Fast);
    let decode = random(8, 2, 1025);
    let want = want(&decode);
    let (one, _) = decode.one_pass(&module, &SEEDS[..3]).unwrap();
    assert!(max_error(widen(&one), &want) < 2e-6);
    let (two, _) = decode.two_pass(&module, &SEEDS[..3]).unwrap();
    assert!(max_error(widen(&two), &want) < 2e-6);
}

#[test]
fn decode_attention_has_no_fault_and_reads_the_cache_once_for_each_query_head() {
    let module = compile_sdpa(Mode::Checked);
    let decode = random(4, 2, 75);
    let want = want(&decode);
    let cache = (2 * 75 * DIM * 4) as u64;
    for (out, stats) in [
        decode.one_pass(&module, &[0]).unwrap(),
        decode.two_pass(&module, &[0]).unwrap(),
    ] {
        assert!(max_error(widen(&out), &want) < 2e-6);
        let memory = stats[0].memory.as_ref().unwrap();
        for buffer in [1, 2] {
            let read = memory.device[&buffer].read;
            assert_eq!((read.unique_bytes, read.bytes), (cache, 2 * cache));
        }
    }
}

fn run_softmax(module: &Module, rows: usize, columns: usize, tolerate: bool) -> Result<f64> {
    let x: Vec<f32> = uniform(4, rows * columns).iter().map(|v| v * 8.0).collect();
    let (input, mut out) = (Buffer::new(&x), Buffer::uninitialised(x.len() * 4));
    let mut dispatch = Dispatch::new("softmax_f32", [rows as u32, 1, 1], [256, 1, 1])
        .value(0, (rows * columns) as u32)
        .value(1, columns as u32)
        .input(2, &input)
        .output(3, &mut out);
    dispatch.tolerance.mem_none_orders = tolerate;
    module.run(&mut dispatch)?;
    let want: Vec<f64> = x
        .chunks(columns)
        .flat_map(|row| softmax(&widen(row).collect::<Vec<_>>()))
        .collect();
    Ok(max_error(widen(&out.to_vec::<f32>()), &want))
}

#[test]
fn softmax_agrees_with_double_precision() {
    let fast = compile("reduce.metal", &["softmax_f32"], Mode::Fast);
    assert!(run_softmax(&fast, 16, 8192, false).unwrap() < 1e-7);
    let checked = compile("reduce.metal", &["softmax_f32"], Mode::Checked);
    assert!(run_softmax(&checked, 3, 1500, true).unwrap() < 1e-7);
}

#[test]
fn softmax_orders_threadgroup_memory_with_mem_none() {
    let checked = compile("reduce.metal", &["softmax_f32"], Mode::Checked);
    let error = run_softmax(&checked, 3, 1500, false)
        .unwrap_err()
        .to_string();
    let named = "does not name mem_flags::mem_threadgroup";
    assert!(
        error.contains(named) && error.contains("reduce.metal:"),
        "{error}"
    );
}

/// candle's GEMMParams, field for field.
#[derive(Clone, Copy)]
struct Gemm {
    m: usize,
    n: usize,
    k: usize,
    transposed: bool,
    /// Of the kernel: rows, columns and depth of a tile, and SIMD groups along rows and columns.
    tile: [usize; 3],
    simdgroups: [usize; 2],
}

impl Gemm {
    fn params(&self) -> Vec<u8> {
        let Gemm { m, n, k, .. } = *self;
        let [rows, columns, depth] = self.tile;
        let ldb = if self.transposed { k } else { n };
        let ints = [m, n, k, k, ldb, n, n.div_ceil(columns), m.div_ceil(rows)];
        let strides = [m * k, n * k, m * n];
        let tail = [0, k / depth, 1, 0];
        let mut bytes: Vec<u8> = ints
            .iter()
            .flat_map(|v| (*v as i32).to_ne_bytes())
            .collect();
        bytes.extend(strides.iter().flat_map(|v| (*v as u64).to_ne_bytes()));
        bytes.extend(tail.iter().flat_map(|v| (*v as i32).to_ne_bytes()));
        bytes
    }

    /// Runs `entry` on device memory of the element type, and returns the output.
    fn run(&self, module: &Module, entry: &str, a: &Buffer, b: &Buffer) -> Result<Buffer> {
        let Gemm { m, n, k, .. } = *self;
        let [rows, columns, depth] = self.tile;
        let element = a.bytes() / (m * k);
        let mut out = Buffer::uninitialised(m * n * element);
        let groups = [n.div_ceil(columns) as u32, m.div_ceil(rows) as u32, 1];
        let threads = [32, self.simdgroups[1] as u32, self.simdgroups[0] as u32];
        let mut dispatch = Dispatch::new(entry, groups, threads)
            .input(0, a)
            .input(1, b)
            .output(3, &mut out)
            .bytes(4, &self.params())
            .constant(10, Constant::Bool(false))
            .constant(100, Constant::Bool(false))
            .constant(110, Constant::Bool(false))
            .constant(200, Constant::Bool(m % rows == 0))
            .constant(201, Constant::Bool(n % columns == 0))
            .constant(202, Constant::Bool(k % depth == 0))
            .constant(300, Constant::Bool(false));
        dispatch.tolerance.mem_none_orders = true;
        dispatch.tolerance.unbound_reads = true;
        module.run(&mut dispatch)?;
        Ok(out)
    }
}

const GEMM_F32: &str = "gemm_nn_f32_f32_32_32_16_2_2";
const GEMM_F16: &str = "gemm_nt_f16_f16_64_32_32_2_2";

#[test]
fn matrix_multiplication_agrees_with_double_precision() {
    let sizes = [
        (Mode::Fast, [128, 96, 80]),
        (Mode::Fast, [77, 130, 100]),
        (Mode::Checked, [37, 50, 41]),
    ];
    for (mode, [m, n, k]) in sizes {
        let module = compile("mlx_gemm.metal", &[GEMM_F32, GEMM_F16], mode);
        let (a, b) = (uniform(5, m * k), uniform(6, k * n));
        let (tile, simdgroups) = ([32, 32, 16], [2, 2]);
        let gemm = Gemm {
            m,
            n,
            k,
            transposed: false,
            tile,
            simdgroups,
        };
        let out = gemm
            .run(&module, GEMM_F32, &Buffer::new(&a), &Buffer::new(&b))
            .unwrap();
        let want = matmul(&a, |i, j| b[i * n + j], m, n);
        assert!(max_error(widen(&out.to_vec::<f32>()), &want) < 1e-5);

        let (a, b) = (to_f16(&a), to_f16(&b));
        let gemm = Gemm {
            transposed: true,
            tile: [64, 32, 32],
            ..gemm
        };
        let out = gemm
            .run(&module, GEMM_F16, &Buffer::new(&a), &Buffer::new(&b))
            .unwrap();
        let a: Vec<f32> = a.iter().map(|v| v.to_f32()).collect();
        let want = matmul(&a, |i, j| b[j * k + i].to_f32(), m, n);
        let got = out.to_vec::<f16>();
        // Half a unit in the last place of values below 32.
        assert!(max_error(got.iter().map(|v| v.to_f64()), &want) < 8e-3);
    }
}
