use crate::any_tensor::{any_tensor, assert_named, is_zero, laid, FLOATS};
use crate::attention_support::{max_error, oracle, SCALE};
use crate::qsa_support::uniform;
use crate::shared_kv_support::turning;
use arbitrary::{Result, Unstructured};
use candle::{DType, Device, Tensor};
use gem::attention::{CpuKernel, RotaryKeys, RotaryTables};
use gem::{AttentionD512, AttentionPartials};

/// As in the tests of accuracy.
const BOUND: f64 = 2e-6;
const WIDTHS: [usize; 6] = [512, 512, 512, 256, 511, 0];

fn any_op(u: &mut Unstructured) -> Result<AttentionD512> {
    let scale = match u.ratio(1, 4)? {
        true => f32::from_bits(u.arbitrary()?),
        false => 1.0,
    };
    let op = AttentionD512::new(scale).causal(u.arbitrary()?);
    Ok(match u.int_in_range(0..=3)? {
        0 => op.partitions(u.int_in_range(0..=70)?),
        1 => op.partitions(u.arbitrary()?),
        _ => op,
    })
}

/// All inputs are 0, and so is any average of them.
pub fn any(u: &mut Unstructured) -> Result<()> {
    let op = any_op(u)?;
    let [q, k] = [any_tensor(u, &WIDTHS)?, any_tensor(u, &WIDTHS)?];
    let v = match u.ratio(1, 4)? {
        true => any_tensor(u, &WIDTHS)?,
        false => k.clone(),
    };
    let checked = op.check(&q, &k, &v).is_ok();
    let out = op.forward(&q, &k, &v);
    assert_eq!(checked, out.is_ok());
    match out {
        Ok(out) => assert!(out.dims() == q.dims() && is_zero(&out)),
        Err(e) => assert_named(e, &["attention_d512"]),
    }
    let tables = RotaryTables::new(&[0.5], u.int_in_range(1..=9)?, &Device::Cpu).unwrap();
    let weight = Tensor::ones(512, DType::F32, &Device::Cpu).unwrap();
    let keys = RotaryKeys::new(&weight, &tables).unwrap();
    let keys = keys.at(match u.ratio(1, 8)? {
        true => u.arbitrary()?,
        false => 0,
    });
    match op.forward_shared_kv(&q, &v, &keys) {
        Ok(out) => assert!(out.dims() == q.dims() && is_zero(&out)),
        Err(e) => assert_named(e, &["attention_d512_shared_kv", "attention_d512"]),
    }
    Ok(())
}

struct Call {
    op: AttentionD512,
    causal: bool,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seed: u64,
}

fn call(u: &mut Unstructured) -> Result<Call> {
    let (batch, kv_heads) = (u.int_in_range(1..=2)?, u.int_in_range(1..=2)?);
    let (group, q_len): (usize, usize) = (u.int_in_range(1..=9)?, u.int_in_range(1..=4)?);
    let kv_len = q_len + u.int_in_range(0..=40usize)?;
    let causal = u.arbitrary()?;
    let seed: u8 = u.arbitrary()?;
    let mut op = AttentionD512::new(SCALE).causal(causal);
    if u.arbitrary()? {
        op = op.partitions(u.int_in_range(1..=50)?);
    }
    let kernels = CpuKernel::ALL
        .into_iter()
        .filter(|kernel| kernel.is_available());
    op = op.cpu_kernel(*u.choose(&kernels.collect::<Vec<_>>())?);
    let mut made = |seed: u64, heads: usize, rows: usize| {
        let dtype = *u.choose(&FLOATS)?;
        let values = uniform(seed, (batch, heads, rows, 512)).and_then(|t| t.to_dtype(dtype));
        laid(u, values.expect("small"))
    };
    let seed = seed.into();
    Ok(Call {
        op,
        causal,
        q: made(seed, group * kv_heads, q_len)?,
        k: made(seed + 1, kv_heads, kv_len)?,
        v: made(seed + 2, kv_heads, kv_len)?,
        seed,
    })
}

fn assert_near(got: &Tensor, want: &[f64]) {
    let error = max_error(got, want).unwrap();
    assert!(error < BOUND, "{error:e}");
}

/// Finished in f32, so that no rounding of the result hides an error.
fn finished(states: &AttentionPartials) -> Tensor {
    states.finish(DType::F32).unwrap()
}

pub fn defined(u: &mut Unstructured) -> Result<()> {
    let Call {
        op,
        causal,
        q,
        k,
        v,
        ..
    } = call(u)?;
    let want = oracle(&q, &k, &v, SCALE as f64, causal).unwrap();
    let states = op.partials(&q, &k, &v).unwrap();
    assert_near(&finished(&states), &want);
    let out = op.forward(&q, &k, &v).unwrap();
    assert_eq!((out.dims(), out.dtype()), (q.dims(), q.dtype()));
    // Prefix and suffix apart, where no row sees less than the prefix.
    let (q_len, kv_len) = (q.dims()[2], k.dims()[2]);
    if kv_len > q_len {
        let cut = u.int_in_range(1..=kv_len - q_len)?;
        let side = |op: AttentionD512, first: usize, len: usize| {
            let part = |t: &Tensor| t.narrow(2, first, len).unwrap();
            op.partials(&q, &part(&k), &part(&v)).unwrap()
        };
        let parts = [side(op.causal(false), 0, cut), side(op, cut, kv_len - cut)];
        let merged = AttentionPartials::merge(&parts).unwrap();
        assert_near(&finished(&merged), &want);
    }
    Ok(())
}

pub fn shared_kv(u: &mut Unstructured) -> Result<()> {
    let Call {
        op,
        causal,
        q,
        v,
        seed,
        ..
    } = call(u)?;
    let (pairs, start) = (u.int_in_range(0..=256)?, u.int_in_range(0..=300)?);
    let turning = turning(seed, pairs, start).unwrap();
    let keys = turning.keys(v.dims()[2]).unwrap();
    let want = turning.oracle(&q, &v, SCALE as f64, causal).unwrap();
    let states = op.partials_shared_kv(&q, &v, &keys).unwrap();
    assert_near(&finished(&states), &want);
    let out = op.forward_shared_kv(&q, &v, &keys).unwrap();
    assert_eq!((out.dims(), out.dtype()), (q.dims(), q.dtype()));
    Ok(())
}
