//! Attention over values alone, against stored keys and against f64.

use crate::attention_support::{bits, flat, inputs, max_error, normal, refusal, SCALE};
use crate::shared_kv_support::turning;
use candle::{DType, Device, Result, Tensor, Var};
use gem::attention::{AttentionGeometry, CpuKernel, RotaryKeys, RotaryTables};
use gem::{attention_d512, attention_d512_shared_kv, AttentionD512, AttentionPartials};

fn kernels() -> impl Iterator<Item = CpuKernel> {
    CpuKernel::ALL
        .into_iter()
        .filter(|kernel| kernel.is_available())
}

/// q and v of `(batch, q_heads, kv_heads, q_len, kv_len)`.
fn q_and_v(
    seed: u64,
    shape: (usize, usize, usize, usize, usize),
    dtype: DType,
) -> Result<(Tensor, Tensor)> {
    let [q, _, v] = inputs(seed, shape)?;
    Ok((q.to_dtype(dtype)?, v.to_dtype(dtype)?))
}

/// Rebuilt keys have the bits of stored ones, and scores are summed in the same order.
#[test]
fn with_f32_values_the_bits_are_those_of_stored_keys() -> Result<()> {
    for (batch, group, q_len, kv_len) in [
        (1, 8, 1, 1),
        (1, 8, 1, 47),
        (2, 8, 1, 700),
        (1, 1, 1, 100),
        (1, 2, 1, 97),
        (1, 3, 1, 50),
        (2, 6, 1, 130),
        (1, 16, 1, 49),
        (2, 8, 5, 96),
        (1, 4, 33, 200),
        (1, 1, 3, 7),
    ] {
        for (pairs, start) in [(64, 0), (64, 4097), (0, 5), (1, 3), (100, 17), (256, 1)] {
            let shape = (batch, 2 * group, 2, q_len, kv_len);
            let (q, v) = q_and_v(kv_len as u64, shape, DType::F32)?;
            let turning = turning(7, pairs, start)?;
            let (k, keys) = (turning.stored(&v)?, turning.keys(kv_len)?);
            for kernel in kernels() {
                for partitions in [None, Some(1), Some(3), Some(64)] {
                    let op = AttentionD512::new(SCALE).cpu_kernel(kernel);
                    let op = partitions.map_or(op, |count| op.partitions(count));
                    assert_eq!(
                        bits(&op.forward_shared_kv(&q, &v, &keys)?)?,
                        bits(&op.forward(&q, &k, &v)?)?,
                        "{shape:?}, {pairs} pairs from {start}, {kernel:?}, P {partitions:?}"
                    );
                }
            }
        }
    }
    Ok(())
}

/// Stored keys are rounded to the type of the cache, rebuilt ones are not.
#[test]
fn with_half_values_the_error_is_at_most_that_of_stored_keys() -> Result<()> {
    for dtype in [DType::F16, DType::BF16] {
        for (group, q_len, kv_len) in [(8, 1, 1000), (8, 1, 33), (1, 1, 300), (4, 40, 170)] {
            let (q, v) = q_and_v(3, (1, 2 * group, 2, q_len, kv_len), dtype)?;
            let turning = turning(5, 64, 1000)?;
            let (k, keys) = (turning.stored(&v)?, turning.keys(kv_len)?);
            let want = turning.oracle(&q, &v, SCALE as f64, true)?;
            for kernel in kernels() {
                let op = AttentionD512::new(SCALE).cpu_kernel(kernel);
                // Finished in f32, so that no rounding hides an error.
                let rebuilt = op.partials_shared_kv(&q, &v, &keys)?.finish(DType::F32)?;
                let stored = op.partials(&q, &k, &v)?.finish(DType::F32)?;
                let (rebuilt, stored) = (max_error(&rebuilt, &want)?, max_error(&stored, &want)?);
                println!("{dtype:?}, group {group}, {q_len} x {kv_len}, {kernel:?}: {rebuilt:.1e}, stored {stored:.1e}");
                assert!(
                    rebuilt <= stored && rebuilt < 2e-6,
                    "{dtype:?}, group {group}, {q_len} x {kv_len}, {kernel:?}: {rebuilt:e}, stored {stored:e}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn every_mix_of_dtypes_is_exact_up_to_the_rounding_of_the_result() -> Result<()> {
    let dtypes = [(DType::F32, 2e-6), (DType::F16, 5e-4), (DType::BF16, 4e-3)];
    for (q_dtype, rounding) in dtypes {
        for (v_dtype, _) in dtypes {
            for (q_len, pairs) in [(1, 64), (9, 64), (1, 40), (9, 256)] {
                let (q, v) = q_and_v(11, (2, 16, 2, q_len, 133), DType::F32)?;
                let (q, v) = (q.to_dtype(q_dtype)?, v.to_dtype(v_dtype)?);
                let turning = turning(1, pairs, 70)?;
                let want = turning.oracle(&q, &v, SCALE as f64, true)?;
                for kernel in kernels() {
                    let op = AttentionD512::new(SCALE).cpu_kernel(kernel);
                    let out = op.forward_shared_kv(&q, &v, &turning.keys(133)?)?;
                    assert_eq!(out.dtype(), q_dtype);
                    let error = max_error(&out, &want)?;
                    assert!(
                        error < rounding,
                        "{q_dtype:?} {v_dtype:?} q_len {q_len}, {pairs} pairs, {kernel:?}: {error:e}"
                    );
                }
            }
        }
    }
    Ok(())
}

#[test]
fn lengths_around_tiles_and_partitions_equal_the_oracle() -> Result<()> {
    for kv_len in [
        1, 2, 3, 47, 48, 49, 95, 96, 97, 255, 256, 257, 511, 513, 8193,
    ] {
        let (q, v) = q_and_v(kv_len as u64, (1, 8, 1, 1, kv_len), DType::BF16)?;
        let turning = turning(2, 64, 9)?;
        let want = turning.oracle(&q, &v, SCALE as f64, true)?;
        for partitions in [1, 2, 7, 32, 33] {
            let op = AttentionD512::new(SCALE).partitions(partitions);
            let got = op.partials_shared_kv(&q, &v, &turning.keys(kv_len)?)?;
            let error = max_error(&got.finish(DType::F32)?, &want)?;
            assert!(error < 2e-6, "{kv_len} in {partitions}: {error:e}");
        }
    }
    Ok(())
}

#[test]
fn a_cache_view_gives_the_bits_of_a_copy_and_nan_beyond_it_never_arrives() -> Result<()> {
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for q_len in [1, 9] {
            let (q, v) = q_and_v(4, (2, 16, 2, q_len, 50), dtype)?;
            let keys = turning(6, 64, 100)?.keys(50)?;
            let want = bits(&attention_d512_shared_kv(&q, &v, &keys, SCALE)?)?;
            let nan = |n| Tensor::full(f32::NAN, (2, 2, n, 512), &Device::Cpu)?.to_dtype(dtype);
            let cache = Tensor::cat(&[&nan(3)?, &v, &nan(70)?], 2)?;
            let token_major = cache.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
            for cache in [cache, token_major] {
                let view = cache.narrow(2, 3, 50)?;
                let got = attention_d512_shared_kv(&q, &view, &keys, SCALE)?;
                assert_eq!(bits(&got)?, want, "{dtype:?}, {q_len} rows");
            }
        }
    }
    Ok(())
}

#[test]
fn a_nan_in_a_later_token_does_not_reach_an_earlier_query_row() -> Result<()> {
    for (dtype, group) in [
        (DType::F32, 2),
        (DType::BF16, 2),
        (DType::F32, 8),
        (DType::BF16, 8),
    ] {
        let (q, v) = q_and_v(6, (1, 2 * group, 2, 6, 60), dtype)?;
        let keys = turning(3, 64, 0)?.keys(60)?;
        let want = attention_d512_shared_kv(&q, &v, &keys, SCALE)?;
        let last = Tensor::full(f32::NAN, (1, 2, 1, 512), &Device::Cpu)?.to_dtype(dtype)?;
        let poisoned = Tensor::cat(&[&v.narrow(2, 0, 59)?, &last], 2)?;
        let got = attention_d512_shared_kv(&q, &poisoned, &keys, SCALE)?;
        assert_eq!(bits(&got.narrow(2, 0, 5)?)?, bits(&want.narrow(2, 0, 5)?)?);
        assert!(flat(&got.narrow(2, 5, 1)?)?.iter().all(|x| x.is_nan()));
    }
    Ok(())
}

#[test]
fn a_prefix_and_a_suffix_merge_into_the_whole() -> Result<()> {
    let (q, v) = q_and_v(3, (2, 16, 2, 4, 364), DType::F32)?;
    let turning = turning(4, 64, 50)?;
    let keys = turning.keys(364)?;
    let op = AttentionD512::new(SCALE);
    // All four query rows come after the prefix, so they see the whole of it.
    let prefix = op
        .causal(false)
        .partials_shared_kv(&q, &v.narrow(2, 0, 300)?, &keys)?;
    let suffix = op.partials_shared_kv(&q, &v.narrow(2, 300, 64)?, &keys.at(350))?;
    let merged = AttentionPartials::merge(&[prefix, suffix])?.finish(DType::F32)?;
    let error = max_error(&merged, &turning.oracle(&q, &v, SCALE as f64, true)?)?;
    assert!(error < 2e-6, "{error:e}");
    Ok(())
}

#[test]
fn repeats_and_thread_counts_do_not_change_a_bit() -> Result<()> {
    for (q_len, dtype) in [(1, DType::F32), (33, DType::BF16)] {
        let (q, v) = q_and_v(8, (2, 16, 2, q_len, 3000), dtype)?;
        let keys = turning(9, 64, 1)?.keys(3000)?;
        let want = bits(&attention_d512_shared_kv(&q, &v, &keys, SCALE)?)?;
        for threads in [1, 2, 3, 8] {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .map_err(candle::Error::wrap)?;
            let again = pool.install(|| attention_d512_shared_kv(&q, &v, &keys, SCALE))?;
            assert_eq!(bits(&again)?, want, "{threads} threads");
        }
    }
    Ok(())
}

/// A start that is off by one, a weight or a rotation that is left out: each moves the result far more than rounding does.
#[test]
fn position_weight_and_rotation_each_matter() -> Result<()> {
    let (q, v) = q_and_v(2, (1, 8, 1, 1, 40), DType::F32)?;
    let turning = turning(1, 64, 20)?;
    let tables = RotaryTables::new(&turning.frequencies, 100, &Device::Cpu)?;
    let still = RotaryTables::new(&[], 100, &Device::Cpu)?;
    let ones = Tensor::ones(512, DType::F32, &Device::Cpu)?;
    let right = RotaryKeys::new(&turning.weight, &tables)?;
    let want = turning.oracle(&q, &v, 1.0, true)?;
    let error = |keys: &RotaryKeys| max_error(&attention_d512_shared_kv(&q, &v, keys, 1.0)?, &want);
    assert!(error(&right.at(20))? < 1e-4);
    // Where only one token is seen later or earlier, distances stay: queries are not turned along.
    for wrong in [
        right.at(21),
        RotaryKeys::new(&ones, &tables)?.at(20),
        RotaryKeys::new(&turning.weight, &still)?.at(20),
    ] {
        assert!(error(&wrong)? > 1e-2, "{:e}", error(&wrong)?);
    }
    Ok(())
}

#[test]
fn tables_hold_the_pairs_that_turn_alone_and_grow_without_changing() -> Result<()> {
    let frequencies: Vec<f64> = (0..256)
        .map(|i| if i < 64 { 0.9f64.powi(i) } else { 0.0 })
        .collect();
    let tables = RotaryTables::new(&frequencies, 1000, &Device::Cpu)?;
    assert_eq!((tables.pairs(), tables.positions()), (64, 1000));
    assert_eq!(tables.bytes(), 1000 * 64 * 2 * 4);
    assert_eq!(RotaryTables::row_bytes(&frequencies), 64 * 2 * 4);
    assert!(tables.are_of(&frequencies) && tables.are_of(&frequencies[..64]));
    assert!(!tables.are_of(&frequencies[..63]) && !tables.are_of(&[1.0; 256]));
    let (q, v) = q_and_v(2, (1, 8, 1, 1, 900), DType::F32)?;
    let weight = normal(3, 512, DType::F32)?;
    let run = |tables: &RotaryTables| {
        bits(&attention_d512_shared_kv(
            &q,
            &v,
            &RotaryKeys::new(&weight, tables)?.at(100),
            1.0,
        )?)
    };
    let grown = RotaryTables::new(&frequencies, 3, &Device::Cpu)?
        .extended(500)?
        .extended(1000)?;
    assert_eq!(run(&grown)?, run(&tables)?);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused_by_name() -> Result<()> {
    let zeros =
        |shape: (usize, usize, usize, usize)| Tensor::zeros(shape, DType::F32, &Device::Cpu);
    let (q, v) = (zeros((2, 8, 1, 512))?, zeros((2, 2, 9, 512))?);
    let keys = turning(1, 64, 0)?.keys(9)?;
    let refused = |q: &Tensor, v: &Tensor, keys: &RotaryKeys| {
        let op = AttentionD512::new(1.0);
        let error = refusal(op.check_shared_kv(q, v, keys));
        assert_eq!(refusal(op.forward_shared_kv(q, v, keys)), error);
        assert_eq!(refusal(op.partials_shared_kv(q, v, keys)), error);
        assert_eq!(refusal(attention_d512_shared_kv(q, v, keys, 1.0)), error);
        error
    };
    insta::assert_snapshot!(refused(&zeros((2, 8, 1, 256))?, &v, &keys), @"attention_d512_shared_kv: q has shape [2, 8, 1, 256], want (batch, q_heads, q_len, 512)");
    insta::assert_snapshot!(refused(&q, &zeros((2, 2, 9, 64))?, &keys), @"attention_d512_shared_kv: v has shape [2, 2, 9, 64], want (batch, kv_heads, kv_len, 512)");
    insta::assert_snapshot!(refused(&q, &zeros((1, 2, 9, 512))?, &keys), @"attention_d512_shared_kv: q has batch 2, v has batch 1, want the same");
    insta::assert_snapshot!(refused(&q, &zeros((2, 2, 0, 512))?, &keys), @"attention_d512_shared_kv: v of shape [2, 2, 0, 512] is empty, want at least one key");
    insta::assert_snapshot!(refused(&q, &zeros((2, 3, 9, 512))?, &keys), @"attention_d512_shared_kv: 8 query heads cannot be shared out to 3 KV heads, want a multiple");
    insta::assert_snapshot!(refused(&q, &v.to_dtype(DType::F64)?, &keys), @"attention_d512_shared_kv: v has dtype F64, want f32, f16 or bf16");
    insta::assert_snapshot!(refused(&q, &v, &keys.at(1)), @"attention_d512_shared_kv: 9 cached tokens from position 1 on reach past the rotary tables, which have 9 positions");
    insta::assert_snapshot!(refused(&q, &v, &keys.at(usize::MAX)), @"attention_d512_shared_kv: 9 cached tokens from position 18446744073709551615 on reach past the rotary tables, which have 9 positions");
    let scale = refusal(AttentionD512::new(f32::NAN).check_shared_kv(&q, &v, &keys));
    insta::assert_snapshot!(scale, @"attention_d512_shared_kv: got a softmax_scale of NaN, want a finite one");
    let states = AttentionD512::new(1.0).partitions(1 << 40);
    insta::assert_snapshot!(refusal(states.partials_shared_kv(&q, &v, &keys)), @"attention_d512_shared_kv: got 1099511627776 partitions, want at most 65535 where their states are kept");

    let tables = keys.tables();
    let weight = Tensor::ones(512, DType::F32, &Device::Cpu)?;
    let keys_of = |weight: &Tensor| refusal(RotaryKeys::new(weight, tables));
    insta::assert_snapshot!(keys_of(&weight.narrow(0, 0, 64)?), @"rotary keys: the weight is [64] F32, want [512] F32");
    insta::assert_snapshot!(keys_of(&weight.to_dtype(DType::BF16)?), @"rotary keys: the weight is [512] BF16, want [512] F32");
    let tables_of = |f: &[f64], n| refusal(RotaryTables::new(f, n, &Device::Cpu));
    insta::assert_snapshot!(tables_of(&[0.0; 257], 1), @"rotary tables: got 257 frequencies, want at most 256, one a pair of a head of 512");
    insta::assert_snapshot!(tables_of(&[1.0, f64::NAN], 1), @"rotary tables: frequency 1 is NaN, want a finite one");
    insta::assert_snapshot!(tables_of(&[1.0], 0), @"rotary tables: got 0 positions, want at least 1");
    insta::assert_snapshot!(tables_of(&[1.0], usize::MAX), @"rotary tables: 18446744073709551615 positions of 32 pairs would take 4722366482869645213440 bytes, which passes the 64-bit address range");
    insta::assert_snapshot!(tables_of(&[1.0], 1 << 44), @"rotary tables: no memory for 17592186044416 positions of 32 pairs, which would take 4503599627370496 bytes");
    let few = RotaryTables::new(&[1.0], 2, &Device::Cpu)?;
    insta::assert_snapshot!(refusal(few.extended(1 << 44)), @"rotary tables: no memory for 17592186044416 positions of 32 pairs, which would take 4503599627370496 bytes");
    insta::assert_snapshot!(refusal(few.extended(usize::MAX)), @"rotary tables: 18446744073709551615 positions of 32 pairs would take 4722366482869645213440 bytes, which passes the 64-bit address range");
    insta::assert_snapshot!(refusal(tables.extended(3)), @"rotary tables: got 3 positions, want at least the 9 that are there");
    Ok(())
}

#[test]
fn training_through_any_of_its_inputs_fails_loudly() -> Result<()> {
    let (q, v) = q_and_v(1, (1, 2, 1, 1, 5), DType::F32)?;
    let turning = turning(1, 64, 0)?;
    let tables = RotaryTables::new(&turning.frequencies, 5, &Device::Cpu)?;
    let refused = |q: &Tensor, v: &Tensor, weight: &Tensor| -> Result<String> {
        let keys = RotaryKeys::new(weight, &tables)?;
        let loss = attention_d512_shared_kv(q, v, &keys, 1.0)?.sum_all()?;
        Ok(refusal(loss.backward()))
    };
    let (q_var, v_var, weight_var) = (
        Var::from_tensor(&q)?,
        Var::from_tensor(&v)?,
        Var::from_tensor(&turning.weight)?,
    );
    for error in [
        refused(&q_var, &v, &turning.weight)?,
        refused(&q, &v_var, &turning.weight)?,
        refused(&q, &v, &weight_var)?,
    ] {
        assert!(
            error.contains("backward is not supported for attention_d512_shared_kv"),
            "{error}"
        );
    }
    Ok(())
}

#[test]
fn half_of_the_bytes_are_read() -> Result<()> {
    let (q, v) = q_and_v(1, (1, 8, 1, 1, 100), DType::BF16)?;
    let keys = turning(1, 64, 0)?.keys(100)?;
    let op = AttentionD512::new(SCALE);
    let bytes = |g: AttentionGeometry| g.kv_bytes();
    let rebuilt = bytes(op.check_shared_kv(&q, &v, &keys)?);
    assert_eq!(rebuilt, 100 * 512 * 2);
    assert_eq!(2 * rebuilt, bytes(op.check(&q, &v, &v)?));
    assert!(attention_d512(&q, &v, &v, SCALE).is_ok());
    Ok(())
}
