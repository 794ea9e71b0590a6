//! qsa_prep on the CPU: parity, splits, carry, and every stage against its definition.

use crate::common::numeric::normal;
use crate::qsa_support::{
    bytes, differing, norms, results, state_at, uniform, Rows, POSITIONS, TOKENS,
};
use candle::{DType, Device, Result, Tensor};
use gem::qsa::{qsa_prep, QsaChunk, QsaPrepared, QsaState};
use half::f16;
use proptest::prelude::*;
use std::time::Instant;

const NONE: [&str; 0] = [];

#[test]
fn fused_rows_give_the_bits_of_separate_tensors() -> Result<()> {
    let all = Rows::fused(1, 2048)?;
    for q_type in [DType::F32, DType::F16] {
        let all = all.q_as(q_type)?;
        for tokens in TOKENS {
            let fused = all.narrow(0, tokens)?;
            let separate = fused.separate()?;
            let narrow = fused.in_1152()?;
            for pos0 in POSITIONS {
                let state = state_at(pos0)?;
                let want = separate.prep(&state)?;
                let case = format!("{q_type:?}, {tokens} tokens from {pos0} on");
                assert_eq!(differing(&fused.prep(&state)?, &want), NONE, "1664, {case}");
                // Without an iq nothing else changes.
                let want = QsaPrepared { qidx: None, ..want };
                assert_eq!(
                    differing(&narrow.prep(&state)?, &want),
                    NONE,
                    "1152, {case}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn fused_rows_read_with_the_default_stride_differ_in_every_case() -> Result<()> {
    let all = Rows::fused(2, 2048)?;
    for tokens in TOKENS {
        let fused = all.narrow(0, tokens)?;
        for rows in [fused.clone(), fused.in_1152()?] {
            let wrong = rows.read_with_the_default_strides()?;
            for pos0 in POSITIONS {
                let state = state_at(pos0)?;
                let found = differing(&wrong.prep(&state)?, &rows.prep(&state)?);
                let case = format!("{tokens} tokens from {pos0} on: {found:?}");
                for name in ["kq", "ksc", "vq", "vsc"] {
                    assert!(found.contains(&name), "{name}, {case}");
                }
                let ik = |name: &&str| ["pooled", "tail and dead"].contains(name);
                assert!(found.iter().any(ik), "ik, {case}");
                assert_eq!(found.contains(&"qidx"), rows.iq.is_some(), "{case}");
                assert!(!found.contains(&"qcur"), "{case}");
            }
        }
    }
    Ok(())
}

/// Any stride that is none of the known ones, and q as a view, too.
#[test]
fn rows_of_any_stride_and_offset_give_the_bits_of_separate_tensors() -> Result<()> {
    let wide = uniform(3, (10, 14_000))?;
    let rows = Rows {
        q: wide.narrow(1, 5, 24 * 512)?.narrow(0, 1, 7)?,
        k: wide.narrow(1, 13_000, 512)?.narrow(0, 2, 7)?,
        v: wide.narrow(1, 900, 512)?.narrow(0, 3, 7)?,
        ik: wide.narrow(1, 1, 128)?.narrow(0, 0, 7)?,
        iq: Some(uniform(4, (1, 512))?.broadcast_as((7, 512))?),
    };
    for pos0 in [0, 7] {
        let state = state_at(pos0)?;
        let want = rows.separate()?.prep(&state)?;
        assert_eq!(differing(&rows.prep(&state)?, &want), NONE);
    }
    Ok(())
}

/// The results of consecutive chunks put together as a caller does.
fn in_chunks(rows: &Rows, start: &QsaState, lengths: &[usize]) -> Result<QsaPrepared> {
    let last_block = (start.pos() + rows.tokens()) / 4;
    let table = Tensor::full(f32::NAN, (last_block + 1, 128), &Device::Cpu)?;
    let (mut state, mut done, mut made) = (start.clone(), 0, vec![]);
    for &tokens in lengths {
        let out = rows.narrow(done, tokens)?.prep(&state)?;
        assert_eq!(out.first_block, state.pos() / 4);
        table.slice_set(&out.pooled, 0, out.first_block)?;
        (state, done) = (out.state.clone(), done + tokens);
        made.push(out);
    }
    assert_eq!((done, state.pos()), (rows.tokens(), start.pos() + done));
    let joined =
        |f: fn(&QsaPrepared) -> &Tensor| Tensor::cat(&made.iter().map(f).collect::<Vec<_>>(), 0);
    let first_block = start.pos() / 4;
    let mut whole = made[0].clone();
    whole.qcur = joined(|out| &out.qcur)?;
    whole.qidx = Some(joined(|out| out.qidx.as_ref().unwrap())?);
    whole.k.codes = joined(|out| &out.k.codes)?;
    whole.k.scales = joined(|out| &out.k.scales)?;
    whole.v.codes = joined(|out| &out.v.codes)?;
    whole.v.scales = joined(|out| &out.v.scales)?;
    whole.pooled = table.narrow(0, first_block, last_block + 1 - first_block)?;
    whole.state = state;
    Ok(whole)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]
    #[test]
    fn any_split_into_chunks_gives_the_bits_of_one_chunk(
        pos0 in prop_oneof![Just(0usize), 0usize..9, 2040usize..2060],
        lengths in prop::collection::vec(1usize..8, 1..9),
        seed in 0u64..1000,
    ) {
        let rows = Rows::fused(seed, lengths.iter().sum()).unwrap();
        let state = state_at(pos0).unwrap();
        let want = rows.prep(&state).unwrap();
        let got = in_chunks(&rows, &state, &lengths).unwrap();
        prop_assert_eq!(differing(&got, &want), NONE);
    }
}

#[test]
fn a_long_chunk_gives_the_bits_of_its_tokens_one_by_one() -> Result<()> {
    let rows = Rows::fused(5, 517)?;
    for pos0 in [0, 2047] {
        let state = state_at(pos0)?;
        let want = rows.prep(&state)?;
        let got = in_chunks(&rows, &state, &[1; 517])?;
        assert_eq!(differing(&got, &want), NONE, "from {pos0} on");
    }
    Ok(())
}

#[test]
fn the_number_of_threads_does_not_change_a_bit() -> Result<()> {
    let rows = Rows::fused(6, 123)?;
    let with = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().unwrap().install(|| rows.prep(&state_at(3)?))
    };
    let one = with(1)?;
    for threads in [2, 7] {
        assert_eq!(differing(&with(threads)?, &one), NONE, "{threads} threads");
    }
    Ok(())
}

#[test]
fn until_block_0_is_complete_the_dead_row_stands_in_for_it() -> Result<()> {
    let rows = Rows::fused(7, 9)?;
    let start = QsaState::start(&Device::Cpu)?;
    for (tokens, blocks) in [(1, 0), (3, 0), (4, 1), (5, 1), (8, 2), (9, 2)] {
        let out = rows.narrow(0, tokens)?.prep(&start)?;
        assert_eq!(out.pooled.dims(), [blocks + 1, 128]);
        assert_eq!(bytes(&out.pooled.get(blocks)?), bytes(&out.state.dead()?));
        // Raw ik of the open block by slot, and zeros.
        for slot in 0..3 {
            let token = 4 * blocks + slot;
            let want = match token < tokens {
                true => rows.ik.get(token)?,
                false => rows.ik.get(0)?.zeros_like()?,
            };
            assert_eq!(bytes(&out.state.tail()?.get(slot)?), bytes(&want));
        }
    }
    Ok(())
}

#[test]
fn a_nan_stays_in_its_row_and_is_not_lost() -> Result<()> {
    let clean = Rows::fused(8, 6)?.separate()?;
    let one_nan = |t: &Tensor, row: usize, column: usize| {
        let mut values = t.to_vec2::<f32>()?;
        values[row][column] = f32::NAN;
        Tensor::new(values, &Device::Cpu)
    };
    let dirty = Rows {
        q: one_nan(&clean.q, 1, 2 * 512 + 9)?,
        k: one_nan(&clean.k, 2, 300)?,
        v: one_nan(&clean.v, 3, 70)?,
        ik: one_nan(&clean.ik, 5, 0)?,
        iq: Some(one_nan(clean.iq.as_ref().unwrap(), 4, 511)?),
    };
    let state = state_at(2)?;
    let (want, got) = (clean.prep(&state)?, dirty.prep(&state)?);
    let nan_at = |t: &Tensor| -> Result<Vec<usize>> {
        let values = t.flatten_all()?.to_dtype(DType::F32)?.to_vec1::<f32>()?;
        Ok((0..values.len()).filter(|i| values[*i].is_nan()).collect())
    };
    let range = |start: usize, len: usize| (start..start + len).collect::<Vec<_>>();
    assert_eq!(nan_at(&got.qcur)?, range((24 + 2) * 256, 256));
    assert_eq!(
        nan_at(got.qidx.as_ref().unwrap())?,
        range((4 * 4 + 3) * 128, 128)
    );
    // The norm of a key spreads it over the head, a value keeps it in its group.
    assert_eq!(nan_at(&got.k.scales)?, range((2 * 2 + 1) * 4, 4));
    assert_eq!(nan_at(&got.v.scales)?, [3 * 2 * 4 + 1]);
    assert_eq!(nan_at(&got.v.dequantize()?)?, range(3 * 512 + 64, 64));
    // Positions 2..=7: block 0 from the state and 2, 3; block 1 from 4 to 7.
    assert_eq!(nan_at(&got.pooled)?, range(128, 128));
    for ((name, got), (_, want)) in results(&got).into_iter().zip(results(&want)) {
        let different = bytes(&got)
            .iter()
            .zip(bytes(&want))
            .filter(|(a, b)| **a != *b)
            .count();
        let row = got.elem_count() / got.dim(0)?;
        let most = if name == "tail and dead" { 0 } else { row };
        assert!(different <= 4 * most, "{name}: {different} bytes");
    }
    Ok(())
}

/// Without that, the rest of the row would be divided by an infinite norm and come out as 0.
#[test]
fn a_row_without_a_finite_norm_is_nan() -> Result<()> {
    for value in [f32::INFINITY, f32::NEG_INFINITY, 1e20] {
        let mut rows = Rows::fused(8, 2)?.separate()?;
        let mut q = rows.q.to_vec2::<f32>()?;
        q[1][3 * 512 + 100] = value;
        rows.q = Tensor::new(q, &Device::Cpu)?;
        let mut k = rows.k.to_vec2::<f32>()?;
        k[1][256 + 200] = value;
        rows.k = Tensor::new(k, &Device::Cpu)?;
        let out = rows.prep(&state_at(4)?)?;
        let head = |t: &Tensor, head| -> Result<Vec<f32>> { t.get(1)?.get(head)?.to_vec1() };
        for (h, wrong) in [(2, false), (3, true), (4, false)] {
            let q = head(&out.qcur, h)?;
            assert!(q.iter().all(|x| x.is_nan() == wrong), "{value}, head {h}");
        }
        let k = out.k.dequantize()?;
        for (h, wrong) in [(0, false), (1, true)] {
            assert!(head(&k, h)?.iter().all(|x| x.is_nan() == wrong), "{value}");
        }
    }
    Ok(())
}

/// One group of 64 values of v: its codes, its scale and the values that they stand for.
fn q8(group: &[f32]) -> (Vec<i8>, f16, Vec<f32>) {
    let mut v = vec![0f32; 512];
    v[64..64 + group.len()].copy_from_slice(group);
    v[128] = 1.0;
    let rows = Rows {
        v: Tensor::from_vec(v, (1, 512), &Device::Cpu).unwrap(),
        ..Rows::fused(9, 1).unwrap()
    };
    let out = rows.prep(&state_at(0).unwrap()).unwrap();
    let codes: Vec<i8> = bytes(&out.v.codes).iter().map(|x| *x as i8).collect();
    let flat = |t: &Tensor| t.flatten_all().unwrap();
    let scales = flat(&out.v.scales).to_vec1::<f16>().unwrap();
    let values = flat(&out.v.dequantize().unwrap()).to_vec1::<f32>().unwrap();
    // Its neighbours do not notice.
    assert_eq!((codes[0], scales[0].to_bits()), (0, 0));
    assert_eq!((codes[128], scales[2]), (127, f16::from_f32(1.0 / 127.0)));
    let group = 64..64 + group.len();
    (
        codes[group.clone()].to_vec(),
        scales[1],
        values[group].to_vec(),
    )
}

#[test]
fn codes_of_zeros_are_zeros() {
    for zero in [0.0, -0.0] {
        let (codes, scale, values) = q8(&[zero; 64]);
        assert_eq!((codes, scale.to_bits()), (vec![0; 64], 0));
        assert_eq!(values, [0.0; 64]);
    }
}

#[test]
fn codes_round_ties_to_even_and_reach_127_on_both_sides() {
    let group = [
        127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, -127.0, 0.4999,
    ];
    let (codes, scale, values) = q8(&group);
    assert_eq!(codes, [127, 0, 2, 2, 0, -2, -2, 126, -126, -127, 0]);
    assert_eq!(scale, f16::ONE);
    assert_eq!(values[..3], [127.0, 0.0, 2.0]);
    // The largest magnitude is negative.
    let (codes, scale, values) = q8(&[-254.0, 1.0, 253.0]);
    assert_eq!((codes, scale.to_f32()), (vec![-127, 0, 126], 2.0));
    assert_eq!(values, [-254.0, 0.0, 252.0]);
}

#[test]
fn a_scale_that_rounds_to_zero_gives_codes_of_zero_and_a_subnormal_one_is_clamped() {
    let tiny = 2f32.powi(-24);
    // Half of the smallest f16 rounds to even: to 0.
    let (codes, scale, _) = q8(&[127.0 * tiny / 2.0, 1e-9]);
    assert_eq!((codes, scale.to_bits()), (vec![0, 0], 0));
    let (codes, scale, _) = q8(&[1e-40, -1e-40]);
    assert_eq!((codes, scale.to_bits()), (vec![0, 0], 0));
    let (codes, scale, _) = q8(&[127.0 * tiny * 0.51, -tiny]);
    assert_eq!((codes, scale.to_bits()), (vec![65, -1], 1));
    // 1.49 rounds down to 1, so that codes would reach 189.
    let (codes, scale, values) = q8(&[127.0 * tiny * 1.49, -127.0 * tiny * 1.49, 100.4 * tiny]);
    assert_eq!((codes, scale.to_bits()), (vec![127, -127, 100], 1));
    assert_eq!(values[0], 127.0 * tiny);
}

#[test]
fn a_group_that_eight_bits_cannot_hold_is_nan_as_a_whole() {
    let (codes, scale, values) = q8(&[127.0 * 65_504.0, 65_504.0]);
    assert_eq!((codes, scale), (vec![127, 1], f16::MAX));
    assert_eq!(values, [127.0 * 65_504.0, 65_504.0]);
    for bad in [
        127.0 * 65_520.0,
        f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        -f32::NAN,
    ] {
        let (codes, scale, values) = q8(&[1.0, bad, 3.0]);
        assert_eq!((codes, scale.to_bits()), (vec![0; 3], 0x7e00), "{bad}");
        assert!(values.iter().all(|x| x.is_nan()), "{bad}: {values:?}");
    }
}

#[test]
fn dequantized_codes_are_codes_times_scale_with_their_sign() -> Result<()> {
    let rows = Rows {
        v: normal(10, (3, 512), DType::F32)?,
        ..Rows::fused(10, 3)?
    };
    let v = rows.prep(&state_at(0)?)?.v;
    let scales = v.scales.flatten_all()?.to_vec1::<f16>()?;
    let want: Vec<f32> = bytes(&v.codes)
        .iter()
        .enumerate()
        .map(|(i, code)| *code as i8 as f32 * scales[i / 64].to_f32())
        .collect();
    let got = v.dequantize()?;
    assert_eq!(got.dims(), [3, 2, 256]);
    assert_eq!(got.flatten_all()?.to_vec1::<f32>()?, want);
    assert!(want.iter().any(|x| *x < 0.0));
    Ok(())
}

/// Processor time of this process in ms, all threads, where the system has it as a file.
fn cpu_ms() -> Option<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // User and system time, in ticks of 10 ms, 12 and 13 words behind the name.
    let words = stat.rsplit(')').next()?.split_whitespace();
    let ticks: Vec<f64> = words.skip(11).take(2).flat_map(str::parse).collect();
    Some(10.0 * ticks.iter().sum::<f64>())
}

/// Median and lowest wall time and mean processor time of `runs` runs, in ms.
fn timed(runs: usize, mut run: impl FnMut() -> Result<()>) -> Result<String> {
    let before = cpu_ms();
    let mut times = vec![];
    for _ in 0..runs {
        let start = Instant::now();
        run()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    let used = cpu_ms().zip(before).map(|(now, then)| now - then);
    times.sort_by(f64::total_cmp);
    let mean = used.unwrap_or(f64::NAN) / runs as f64;
    Ok(format!(
        "{:.3} ({:.3}), {mean:.3}",
        times[runs / 2],
        times[0]
    ))
}

/// The table of docs/qsa.md: `cargo test --release -- --ignored --nocapture qsa_prep::times`
#[test]
#[ignore = "measures, asserts nothing but that it runs"]
fn times() -> Result<()> {
    let state = state_at(2048)?;
    let norms = norms()?;
    println!("ms: median (lowest), processor time");
    println!("| T | q | qsa_prep | a copy of the queries by candle | QsaChunk |");
    println!("|---:|---|---:|---:|---:|");
    for tokens in [1, 256, 2048] {
        let runs = 80_000 / (tokens + 80);
        let made = || QsaChunk::new(2048, tokens, &Device::Cpu);
        let chunk = made()?;
        for q_type in [DType::F32, DType::F16] {
            let rows = Rows::fused(12, tokens)?.q_as(q_type)?;
            let op = timed(runs, || {
                std::hint::black_box(qsa_prep(&rows.inputs(), &norms, &chunk, &state)?);
                Ok(())
            })?;
            let heads = rows.q.reshape((tokens, 24, 512))?.narrow(2, 0, 256)?;
            let copy = timed(runs, || {
                std::hint::black_box(heads.force_contiguous()?);
                Ok(())
            })?;
            let chunk = timed(runs, || {
                std::hint::black_box(made()?);
                Ok(())
            })?;
            println!("| {tokens} | {q_type:?} | {op} | {copy} | {chunk} |");
        }
    }
    Ok(())
}
