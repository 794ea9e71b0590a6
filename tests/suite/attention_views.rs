//! Strides, offsets and what lies beyond a view.

use candle::{DType, Device, Result, Tensor};
use gem::attention::geometry::element_offset;
use gem::attention::{AttentionGeometry, RotaryKeys, RotaryTables};
use gem::{attention_d512, attention_d512_shared_kv, FusedProjection};
use half::bf16;
use half::vec::HalfBitsVecExt;

use crate::attention_support::{bits, flat, inputs, normal, refusal, SCALE};

fn bits_of(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Vec<u32>> {
    bits(&attention_d512(q, k, v, SCALE)?)
}

/// A cache of capacity `capacity` that holds NaN wherever `t` does not, narrowed to `t` again.
fn poisoned_cache(t: &Tensor, capacity: usize, token_major: bool) -> Result<Tensor> {
    let (batch, heads, len, dim) = t.dims4()?;
    let nan =
        |len| Tensor::full(f32::NAN, (batch, heads, len, dim), &Device::Cpu)?.to_dtype(t.dtype());
    let cache = Tensor::cat(&[&nan(3)?, t, &nan(capacity - len - 3)?], 2)?;
    let cache = if token_major {
        cache.transpose(1, 2)?.contiguous()?.transpose(1, 2)?
    } else {
        cache
    };
    cache.narrow(2, 3, len)
}

/// huggingface/candle#3703: kernels that assumed packed rows read wrong numbers from views, without an error.
#[test]
fn transposed_and_narrowed_views_give_the_bits_of_contiguous_copies() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for q_len in [1, 5] {
            let [q, k, v] = inputs(1, (2, 32, 4, q_len, 50))?;
            let (q, k, v) = (q.to_dtype(dtype)?, k.to_dtype(dtype)?, v.to_dtype(dtype)?);
            let want = bits_of(&q, &k, &v)?;
            let token_major = |t: &Tensor| t.transpose(1, 2)?.contiguous()?.transpose(1, 2);
            let views = [token_major(&q)?, token_major(&k)?, token_major(&v)?];
            assert!(!views[1].is_contiguous());
            assert_eq!(
                bits_of(&views[0], &views[1], &views[2])?,
                want,
                "{dtype:?} {q_len}"
            );
            for (k_major, v_major) in [(false, false), (true, false), (false, true), (true, true)] {
                let k = poisoned_cache(&k, 64, k_major)?;
                let v = poisoned_cache(&v, 64, v_major)?;
                assert_eq!(
                    bits_of(&q, &k, &v)?,
                    want,
                    "{dtype:?} {q_len} {k_major} {v_major}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn slices_of_one_fused_projection_need_no_copy() -> Result<()> {
    // (batch, tokens, (q heads + k heads + v heads) * 512), cut in the last dimension: three tensors, one storage.
    let (batch, tokens, q_heads, kv_heads) = (2, 5, 8, 2);
    let fused = normal(
        3,
        (batch, tokens, (q_heads + 2 * kv_heads) * 512),
        DType::F32,
    )?;
    let cut = |first: usize, heads: usize| {
        fused
            .narrow(2, first * 512, heads * 512)?
            .reshape((batch, tokens, heads, 512))?
            .transpose(1, 2)
    };
    // `reshape` copies a narrowed tensor, so the views are also made by narrowing the heads of a 4-d tensor.
    let heads = fused
        .reshape((batch, tokens, q_heads + 2 * kv_heads, 512))?
        .transpose(1, 2)?;
    let q = heads.narrow(1, 0, q_heads)?;
    let k = heads.narrow(1, q_heads, kv_heads)?;
    let v = heads.narrow(1, q_heads + kv_heads, kv_heads)?;
    assert!(!q.is_contiguous() && !v.is_contiguous());
    let want = bits_of(
        &cut(0, q_heads)?.contiguous()?,
        &cut(q_heads, kv_heads)?.contiguous()?,
        &cut(q_heads + kv_heads, kv_heads)?.contiguous()?,
    )?;
    assert_eq!(bits_of(&q, &k, &v)?, want);
    Ok(())
}

#[test]
fn broadcast_inputs_with_stride_zero_give_the_bits_of_copies() -> Result<()> {
    let [q, k, v] = inputs(4, (1, 8, 1, 1, 40))?;
    let q = q.broadcast_as((3, 8, 1, 512))?;
    let k = k.broadcast_as((3, 2, 40, 512))?;
    let v = v.broadcast_as((3, 2, 40, 512))?;
    assert_eq!(k.stride()[1], 0);
    let want = bits_of(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?)?;
    assert_eq!(bits_of(&q, &k, &v)?, want);
    Ok(())
}

#[test]
fn a_nan_in_a_later_key_does_not_reach_an_earlier_query_row() -> Result<()> {
    let [q, k, v] = inputs(6, (1, 4, 2, 6, 60))?;
    let want = attention_d512(&q, &k, &v, SCALE)?;
    let poison = |t: &Tensor| {
        let last = Tensor::full(f32::NAN, (1, 2, 1, 512), &Device::Cpu)?;
        Tensor::cat(&[&t.narrow(2, 0, 59)?, &last], 2)
    };
    let got = attention_d512(&q, &poison(&k)?, &poison(&v)?, SCALE)?;
    assert_eq!(bits(&got.narrow(2, 0, 5)?)?, bits(&want.narrow(2, 0, 5)?)?);
    assert!(flat(&got.narrow(2, 5, 1)?)?.iter().all(|x| x.is_nan()));
    Ok(())
}

#[test]
fn a_nan_or_infinity_in_a_live_key_is_not_hidden() -> Result<()> {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let q = Tensor::ones((1, 8, 1, 512), DType::F32, &Device::Cpu)?;
        let k = Tensor::full(bad, (1, 1, 70, 512), &Device::Cpu)?;
        let v = Tensor::ones((1, 1, 70, 512), DType::F32, &Device::Cpu)?;
        let out = flat(&attention_d512(&q, &k, &v, SCALE)?)?;
        assert!(out.iter().all(|x| x.is_nan()), "{bad}: {}", out[0]);
    }
    Ok(())
}

/// ml-explore/mlx#2894: 32-bit offsets wrap at long context.
#[test]
fn offsets_are_64_bit_and_their_overflow_is_seen() {
    assert_eq!(
        element_offset(0, &[46_400, 1], &[46_399, 46_399]),
        Some(2_152_959_999)
    );
    let cache = [4 * 131_072 * 512, 131_072 * 512, 512, 1];
    let last = |batches: u64| element_offset(0, &cache, &[batches - 1, 3, 131_071, 511]);
    assert_eq!(last(8), Some(2_147_483_647));
    assert_eq!(last(9), Some(2_415_919_103));
    let bytes = [2 * 4 * 131_072 * 512, 2 * 131_072 * 512, 2 * 512, 2];
    assert_eq!(
        element_offset(0, &bytes, &[8, 3, 131_071, 511]),
        Some(2 * 2_415_919_103)
    );
    assert_eq!(element_offset(1, &[u64::MAX], &[1]), None);
    assert_eq!(element_offset(0, &[1 << 40], &[1 << 24]), None);
}

#[test]
fn a_layout_that_passes_64_bits_is_refused_before_anything_is_read() {
    let layout =
        |row_stride| candle::Layout::new((1, 1, 4, 512).into(), vec![0, 0, row_stride, 1], 0);
    let new = |stride| {
        let q = candle::Layout::contiguous((1, 1, 1, 512));
        let k = layout(stride);
        AttentionGeometry::from_layouts(
            "attention_d512",
            (&q, DType::F32),
            (&k, DType::F32),
            (&k, DType::F32),
            true,
        )
    };
    assert!(new(1 << 40).is_ok());
    insta::assert_snapshot!(
        refusal(new(usize::MAX / 2)),
        @"attention_d512: k of shape [1, 1, 4, 512] with strides [0, 0, 9223372036854775807, 1] passes the 64-bit address range"
    );
}

/// The same report, with a storage of more than 2^32 elements: 8.6 GB of addresses, of which the last pages alone are touched.
#[test]
#[ignore = "8.6 GB of addresses; run with --ignored past_2_to_the_32"]
fn views_past_2_to_the_32_elements_give_the_bits_of_copies() -> Result<()> {
    const FIRST: usize = 1 << 32;
    const ROWS: usize = 64;
    // Zeros that nobody writes are pages that nobody has.
    let mut values = vec![0u16; FIRST + ROWS * 512].reinterpret_into::<bf16>();
    let tail = normal(1, (ROWS, 512), DType::BF16)?;
    let tail = tail.flatten_all()?.to_vec1::<bf16>()?;
    values[FIRST..].copy_from_slice(&tail);
    let rows = values.len() / 512;
    let all = Tensor::from_vec(values, (1, 1, rows, 512), &Device::Cpu)?;
    let view = |first: usize, len: usize| all.narrow(2, rows - ROWS + first, len);
    let (q, k, v) = (view(60, 4)?, view(1, 40)?, view(7, 40)?);
    let copy =
        |t: &Tensor| Tensor::from_vec(t.flatten_all()?.to_vec1::<bf16>()?, t.shape(), &Device::Cpu);
    assert!(k.layout().start_offset() > u32::MAX as usize);
    let (q2, k2, v2) = (copy(&q)?, copy(&k)?, copy(&v)?);
    let want = bits_of(&q2, &k2, &v2)?;
    assert!(flat(&attention_d512(&q2, &k2, &v2, SCALE)?)?
        .iter()
        .any(|x| *x != 0.0));
    for (what, [q, k, v]) in [
        ("q", [&q, &k2, &v2]),
        ("k", [&q2, &k, &v2]),
        ("v", [&q2, &k2, &v]),
        ("all", [&q, &k, &v]),
    ] {
        assert_eq!(bits_of(q, k, v)?, want, "{what}");
    }
    let tables = RotaryTables::new(&[1.0, 0.5], 40, &Device::Cpu)?;
    let keys = RotaryKeys::new(&normal(2, 512, DType::F32)?, &tables)?;
    let shared = |q, v| bits(&attention_d512_shared_kv(q, v, &keys, SCALE)?);
    assert_eq!(shared(&q, &v)?, shared(&q2, &v2)?);
    let projection = FusedProjection::pack(&[("a", &k2.squeeze(0)?.squeeze(0)?)])?;
    let projected = |xs| bits(projection.forward(xs)?.packed());
    assert_eq!(projected(&v)?, projected(&v2)?);
    Ok(())
}

#[test]
fn repeats_and_thread_counts_do_not_change_a_bit() -> Result<()> {
    for q_len in [1, 33] {
        let [q, k, v] = inputs(8, (2, 16, 2, q_len, 3000))?;
        let k = k.to_dtype(DType::BF16)?;
        let want = bits_of(&q, &k, &v)?;
        for threads in [1, 2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .map_err(candle::Error::wrap)?;
            for _ in 0..2 {
                assert_eq!(
                    pool.install(|| bits_of(&q, &k, &v))?,
                    want,
                    "{threads} threads"
                );
            }
        }
    }
    Ok(())
}
