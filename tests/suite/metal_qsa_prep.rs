//! The Metal kernel of qsa_prep, from its text, on the plan that Metal would be given: the bits of the CPU, and faults planted.

use crate::metal_support::{compile, run, run_plan};
use crate::qsa_support::{bytes, norms, results, state_at, uniform, Rows, POSITIONS, TOKENS};
use candle::{DType, Device, Tensor};
use gem::backend::plan::{Binding, Plan};
use gem::qsa::prep::geometry::PrepGeometry;
use gem::qsa::prep::{gpu, operands};
use gem::qsa::{QsaChunk, QsaState};
use msl::Mode;
use std::sync::Arc;

type Named = Vec<(&'static str, Vec<u8>)>;

fn on_cpu(rows: &Rows, state: &QsaState) -> Named {
    let out = rows.prep(state).unwrap();
    let named = results(&out).into_iter();
    named.map(|(name, t)| (name, bytes(&t))).collect()
}

/// What `launch` makes of the plan of a call and of its operands, by name.
fn launched<S>(
    rows: &Rows,
    state: &QsaState,
    launch: impl FnOnce(&Plan, &[&Tensor]) -> msl::Result<(Vec<Tensor>, S)>,
) -> msl::Result<(Named, S)> {
    let chunk = QsaChunk::new(state.pos(), rows.tokens(), &Device::Cpu).unwrap();
    let (inputs, norms) = (rows.inputs(), norms().unwrap());
    let geometry = PrepGeometry::new(&inputs, &norms, &chunk, state).unwrap();
    let plan = gpu::plan(&geometry);
    let (made, stats) = launch(&plan, &operands(&inputs, &norms, &chunk, state))?;
    let names = [
        "qcur",
        "kq",
        "ksc",
        "vq",
        "vsc",
        "pooled",
        "tail and dead",
        "qidx",
    ];
    let named = names.into_iter().zip(made.iter().map(bytes)).collect();
    Ok((named, stats))
}

fn assert_same(rows: &Rows, state: &QsaState, mode: Mode, case: &str) {
    let (got, _) = launched(rows, state, |plan, inputs| run(plan, inputs, mode)).unwrap();
    let want = on_cpu(rows, state);
    assert_eq!(got.len(), want.len(), "{case}");
    for ((name, got), (_, want)) in got.iter().zip(&want) {
        let at = got.iter().zip(want).position(|(a, b)| a != b);
        assert!(got == want, "{name}, {case}: byte {at:?} differs");
    }
}

/// Rows in each of the four ways that a kernel is compiled for, and without an iq.
fn layouts(fused: &Rows) -> Vec<(&'static str, Rows)> {
    let separate = fused.separate().unwrap();
    let strided = Rows {
        v: separate.v.clone(),
        ..fused.clone()
    };
    vec![
        ("1664", fused.clone()),
        ("1664 without iq", fused.without_iq()),
        ("1152", fused.in_1152().unwrap()),
        ("separate", separate),
        ("strided", strided),
    ]
}

#[test]
fn the_kernel_gives_the_bits_of_the_cpu() {
    for tokens in [1, 2, 3, 5] {
        let fused = Rows::fused(60 + tokens as u64, tokens).unwrap();
        for q_type in [DType::F32, DType::F16] {
            for (layout, rows) in layouts(&fused.q_as(q_type).unwrap()) {
                for pos0 in POSITIONS {
                    let case = format!("{layout}, {q_type:?}, {tokens} tokens from {pos0} on");
                    let state = state_at(pos0).unwrap();
                    // Faults of access depend on the phase and on whether position 0 is there.
                    let mode = match pos0 {
                        0 | 1 | 1022 | 2047 => Mode::Checked,
                        _ => Mode::Fast,
                    };
                    assert_same(&rows, &state, mode, &case);
                }
            }
        }
    }
}

#[test]
fn more_pooled_rows_than_a_threadgroup_takes_give_the_bits_of_the_cpu() {
    for (tokens, pos0) in [(28, 0), (29, 3), (33, 2), (70, 1)] {
        let rows = Rows::fused(70, tokens).unwrap();
        let case = format!("{tokens} tokens from {pos0} on");
        assert_same(&rows, &state_at(pos0).unwrap(), Mode::Checked, &case);
    }
}

/// `cargo test --release -- --ignored --nocapture metal_qsa_prep::the_kernel_gives_the_bits_of_the_cpu_for_whole_chunks`
#[test]
#[ignore = "takes minutes"]
fn the_kernel_gives_the_bits_of_the_cpu_for_whole_chunks() {
    let mut cases = 0;
    for tokens in TOKENS {
        let fused = Rows::fused(80, tokens).unwrap();
        for q_type in [DType::F32, DType::F16] {
            for (layout, rows) in layouts(&fused.q_as(q_type).unwrap()) {
                for pos0 in POSITIONS {
                    let case = format!("{layout}, {q_type:?}, {tokens} tokens from {pos0} on");
                    assert_same(&rows, &state_at(pos0).unwrap(), Mode::Fast, &case);
                    cases += 1;
                }
            }
        }
    }
    println!("{cases} cases, every byte the same");
}

#[test]
fn values_that_eight_bits_cannot_hold_give_the_bits_of_the_cpu() {
    let tiny = 2f32.powi(-24);
    let groups = [
        [0.0, -0.0, 0.0],
        [127.0 * tiny / 2.0, tiny / 4.0, 0.0],
        [127.0 * tiny * 1.49, -127.0 * tiny * 1.49, tiny],
        [-127.0, 0.5, -1.5],
        [127.0 * 65_504.0, -1.0, 65_504.0],
        [127.0 * 65_520.0, 1.0, 2.0],
        [f32::INFINITY, 1.0, 2.0],
        [1.0, 2.0, f32::NAN],
    ];
    let mut v = vec![0f32; 512];
    for (to, from) in v.chunks_mut(64).zip(groups) {
        to[..2].copy_from_slice(&from[..2]);
        to[63] = from[2];
    }
    let rows = Rows {
        v: Tensor::from_vec(v, (1, 512), &Device::Cpu).unwrap(),
        ..Rows::fused(90, 1).unwrap().separate().unwrap()
    };
    assert_same(&rows, &state_at(0).unwrap(), Mode::Checked, "edges of Q8");
}

/// What becomes of 9 tokens from position 2 on, with a changed text and plan: an error of the harness, or the results that
/// differ from those of the CPU.
fn outcome(
    text: impl Fn(&str) -> String,
    change: impl Fn(&mut Plan),
) -> Result<Vec<&'static str>, String> {
    let rows = Rows::fused(100, 9).unwrap();
    let state = state_at(2).unwrap();
    let launch = |plan: &Plan, inputs: &[&Tensor]| {
        let mut plan = plan.clone();
        change(&mut plan);
        run_plan(&plan, inputs, Mode::Checked, |pass| {
            let text = text(pass.source.text());
            Arc::new(compile(pass.source, &text, &[pass.entry], Mode::Checked).unwrap())
        })
    };
    let (got, _) = launched(&rows, &state, launch).map_err(|e| e.to_string())?;
    let pairs = got.into_iter().zip(on_cpu(&rows, &state));
    Ok(pairs
        .filter(|((_, got), (_, want))| got != want)
        .map(|((name, _), _)| name)
        .collect())
}

/// A text with one place changed, which must be there.
fn planted(from: &'static str, to: &'static str) -> impl Fn(&str) -> String {
    move |text| {
        assert_eq!(text.matches(from).count(), 1, "{from}");
        text.replace(from, to)
    }
}

fn same(text: &str) -> String {
    text.to_string()
}

#[test]
fn nothing_is_found_where_nothing_was_planted() {
    assert_eq!(outcome(same, |_| ()), Ok(vec![]));
}

#[test]
fn a_kernel_of_other_strides_reads_other_rows() {
    let entry = |entry: &'static str| outcome(same, move |plan| plan.passes[0].entry = entry);
    let all = vec!["kq", "ksc", "vq", "vsc", "pooled", "tail and dead", "qidx"];
    assert_eq!(entry("qsa_prep_f32_separate"), Ok(all.clone()));
    assert_eq!(entry("qsa_prep_f32_fused1152"), Ok(all));
    assert_eq!(entry("qsa_prep_f32_strided"), Ok(vec![]));
}

#[test]
fn swapped_rows_give_other_results() {
    for (from, to, want) in [
        ("token * v_row", "token * HEADS", vec!["vq", "vsc"]),
        ("p.k.start + token", "p.v.start + token", vec!["kq", "ksc"]),
        ("HEADS + head) * DIM", "HEADS + head % 23) * DIM", vec![]),
        ("norms + NORM_K,", "norms + NORM_Q,", vec!["kq", "ksc"]),
        (
            "(token - p.phase) * row",
            "token * row",
            vec!["pooled", "tail and dead"],
        ),
    ] {
        match outcome(planted(from, to), |_| ()) {
            Ok(found) => assert_eq!(found, want, "{to} for {from}"),
            Err(e) => assert!(
                e.contains("race") || e.contains("out of bounds"),
                "{to} for {from}: {e}"
            ),
        }
    }
}

#[test]
fn a_sum_in_another_order_has_other_bits() {
    let found = outcome(
        planted(
            "ushort half_of = GEM_LANES / 2; half_of > 0; half_of /= 2",
            "ushort half_of = 1; half_of < GEM_LANES; half_of *= 2",
        ),
        |_| (),
    );
    assert!(
        found.as_ref().is_ok_and(|f| f.contains(&"qcur")),
        "{found:?}"
    );
}

#[test]
fn two_owners_of_a_row_are_a_race_with_its_line() {
    for (from, to) in [
        (
            "pooled[ulong(block) * INDEX_DIM",
            "pooled[ulong(block / 2) * INDEX_DIM",
        ),
        ("kq : vq) + row * DIM", "kq : vq) + token * DIM"),
    ] {
        let found = outcome(planted(from, to), |_| ());
        assert!(
            found
                .as_ref()
                .is_err_and(|e| e.contains("race") && e.contains("qsa_prep.metal")),
            "{from}: {found:?}"
        );
    }
}

/// The kernel has no barrier that could be missing, since its old state is one buffer and its new state another. A kernel that
/// kept both in one would need one.
#[test]
fn a_state_that_is_read_where_it_is_written_is_found() {
    let found = outcome(
        |text| {
            text.replace(
                "qsa_member(ik, ik_row, state,",
                "qsa_member(ik, ik_row, new_state,",
            )
        },
        |_| (),
    );
    assert!(
        found
            .as_ref()
            .is_err_and(|e| e.contains("race") || e.contains("nobody")),
        "{found:?}"
    );
}

#[test]
fn a_row_past_the_last_is_out_of_bounds() {
    let found = outcome(planted("block > p.blocks", "block > p.blocks + 1"), |_| ());
    assert!(
        found
            .as_ref()
            .is_err_and(|e| e.contains("out of bounds") || e.contains("behind")),
        "{found:?}"
    );
}

#[test]
fn an_output_that_is_bound_as_an_input_is_found() {
    for buffer in 8..16 {
        let found = outcome(same, |plan| {
            let binding = &mut plan.passes[0].buffers[buffer];
            *binding = Binding::Read(binding.slot());
        });
        let name = format!("buffer {buffer}");
        assert!(
            found.as_ref().is_err_and(|e| e.contains(&name)),
            "{name}: {found:?}"
        );
    }
}

/// The gates of q are not touched; ik is read a second time for position 0.
#[test]
fn every_byte_of_the_projections_is_read_once() {
    let tokens = 13;
    let rows = Rows::fused(110, tokens).unwrap();
    for (pos0, again) in [(0, 1), (2, 0)] {
        let launch = |plan: &Plan, inputs: &[&Tensor]| run(plan, inputs, Mode::Checked);
        let (_, stats) = launched(&rows, &state_at(pos0).unwrap(), launch).unwrap();
        let memory = stats[0].memory.as_ref().unwrap();
        let read = |buffer: u32| memory.device[&buffer].read;
        for (buffer, width) in [(0, 24 * 256), (1, 512), (2, 512), (7, 512)] {
            let want = (tokens * width * 4) as u64;
            assert_eq!(
                (read(buffer).bytes, read(buffer).unique_bytes),
                (want, want),
                "{buffer}"
            );
        }
        let want = (tokens * 128 * 4) as u64;
        assert_eq!(read(3).unique_bytes, want);
        assert_eq!(read(3).bytes, want + again * 128 * 4);
        assert_eq!(
            memory.threadgroup.read.bytes + memory.threadgroup.written.bytes,
            0
        );
    }
}

/// Half-precision rows that lie at odd offsets: vectors of them would be misaligned.
#[test]
fn rows_at_odd_offsets_give_the_bits_of_the_cpu() {
    let wide = uniform(120, (4, 14_001)).unwrap();
    let view = |first, len| wide.narrow(1, first, len).unwrap();
    let half = wide.to_dtype(DType::F16).unwrap();
    let rows = Rows {
        q: half.narrow(1, 3, 24 * 512).unwrap(),
        k: view(1, 512),
        v: view(515, 512),
        ik: view(7, 128),
        iq: Some(view(13_003, 512)),
    };
    assert_same(&rows, &state_at(2).unwrap(), Mode::Checked, "odd offsets");
}
