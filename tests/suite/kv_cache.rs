//! What tokens may attend to does not depend on how a prompt is fed, and a cache never hands out overwritten rows.
//!
//! The mean test: with all keys equal, attention is uniform, so where the value of position i is the constant i the output
//! at position p is the mean of the visible positions: `p / 2`, or `p - (window - 1) / 2` once p is past the window.

use crate::common::message;
use candle::{DType, Device, Result, Tensor};
use gem::attention::reference;
use gem::models::gemma4::{LayerCache, LayerKind};

const DIM: usize = 4;

fn kv(positions: std::ops::Range<usize>) -> (Tensor, Tensor) {
    let rows: Vec<f32> = positions.clone().flat_map(|p| [p as f32; DIM]).collect();
    let v = Tensor::from_vec(rows, (1, 1, positions.len(), DIM), &Device::Cpu).unwrap();
    (v.zeros_like().unwrap(), v)
}

/// Feeds positions `at..at + tokens` and returns their attention outputs.
fn feed(cache: &mut LayerCache, tokens: usize) -> Result<Vec<f32>> {
    let at = cache.len();
    let (k, v) = kv(at..at + tokens);
    let view = cache.append(&k, &v)?;
    let out = reference::attention(&k, &view.k, &view.v, 1.0, view.visible)?;
    out.narrow(3, 0, 1)?.flatten_all()?.to_vec1()
}

fn feed_all(kind: LayerKind, chunks: &[usize]) -> Vec<f32> {
    let mut cache = LayerCache::new(kind);
    chunks
        .iter()
        .flat_map(|&tokens| feed(&mut cache, tokens).unwrap())
        .collect()
}

fn mean_of_window(p: usize, window: usize) -> f32 {
    if p < window {
        p as f32 / 2.0
    } else {
        p as f32 - (window as f32 - 1.0) / 2.0
    }
}

fn assert_means(outputs: &[f32], first: usize, window: usize) {
    for (i, &out) in outputs.iter().enumerate() {
        let (p, want) = (first + i, mean_of_window(first + i, window));
        assert!(
            (out - want).abs() <= 1e-4 * want.max(1.0),
            "position {p}: {out}, want {want}"
        );
    }
}

/// pytorch/executorch#20346: chunks that overwrite keys which their own first queries still need.
#[test]
fn every_chunking_of_a_prompt_sees_the_same_window() {
    let kind = LayerKind::Sliding { window: 8 };
    for chunks in [
        vec![1; 40],
        [vec![3; 13], vec![1]].concat(),
        vec![8; 5],
        vec![16, 16, 8],
        vec![40],
        vec![7, 16, 17],
    ] {
        let outputs = feed_all(kind, &chunks);
        assert_eq!(outputs.len(), 40, "{chunks:?}");
        for (p, want) in [(6, 3.0), (7, 3.5), (8, 4.5), (39, 35.5)] {
            assert!(
                (outputs[p] - want).abs() < 1e-4,
                "{chunks:?}: position {p}: {}, want {want}",
                outputs[p]
            );
        }
        assert_means(&outputs, 0, 8);
    }
}

#[test]
fn a_full_layer_sees_everything_under_every_chunking() {
    for chunks in [vec![1; 600], vec![600], vec![255, 1, 1, 343], vec![7; 86]] {
        assert_means(&feed_all(LayerKind::Full, &chunks), 0, usize::MAX);
    }
}

/// NVIDIA-NeMo/Megatron-Bridge#2656: the window counts the current token.
#[test]
fn the_window_counts_the_current_token() {
    let kind = LayerKind::Sliding { window: 1024 };
    for chunks in [vec![2500], vec![1000, 24, 1, 1475], vec![512; 5]] {
        let outputs = feed_all(kind, &chunks);
        for (p, want) in [
            (1022, 511.0),
            (1023, 511.5),
            (1024, 512.5),
            (1025, 513.5),
            (1026, 514.5),
            (1500, 988.5),
            (2048, 1536.5),
            (2499, 1987.5),
        ] {
            assert!(
                (outputs[p] - want).abs() < 0.02,
                "{chunks:?}: position {p}: {}, want {want}",
                outputs[p]
            );
        }
    }
    // Rows visible to each position: ones as values, counted through uniform attention over 4 tokens.
    let counts: Vec<_> = (0..6)
        .map(|p| 2.0 * (p as f32 - mean_of_window(p, 4)) + 1.0)
        .collect();
    let outputs = feed_all(LayerKind::Sliding { window: 4 }, &[6]);
    let seen: Vec<_> = outputs
        .iter()
        .enumerate()
        .map(|(p, out)| 2.0 * (p as f32 - out) + 1.0)
        .collect();
    assert_eq!(counts, [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]);
    assert_eq!(seen, counts);
}

#[test]
fn a_key_leaves_the_window_exactly_when_it_should() {
    let window = 1024;
    for chunk in [1usize, 100, 1025] {
        let mut cache = LayerCache::new(LayerKind::Sliding { window });
        let mut outputs = vec![];
        while outputs.len() < 1025 {
            let (at, tokens) = (outputs.len(), chunk.min(1025 - outputs.len()));
            // Key 0 takes all the attention of whoever sees it.
            let keys: Vec<f32> = (at..at + tokens)
                .flat_map(|p| [if p == 0 { 100.0 } else { 0.0 }; DIM])
                .collect();
            let values: Vec<f32> = (at..at + tokens)
                .flat_map(|p| [if p == 0 { 999.0 } else { 1.0 }; DIM])
                .collect();
            let shape = (1, 1, tokens, DIM);
            let (k, v) = (
                Tensor::from_vec(keys, shape, &Device::Cpu).unwrap(),
                Tensor::from_vec(values, shape, &Device::Cpu).unwrap(),
            );
            let view = cache.append(&k, &v).unwrap();
            let out =
                reference::attention(&k.ones_like().unwrap(), &view.k, &view.v, 1.0, view.visible)
                    .unwrap();
            outputs.extend(
                out.narrow(3, 0, 1)
                    .unwrap()
                    .flatten_all()
                    .unwrap()
                    .to_vec1::<f32>()
                    .unwrap(),
            );
        }
        assert_eq!(
            (outputs[1023], outputs[1024]),
            (999.0, 1.0),
            "chunks of {chunk}"
        );
    }
}

/// EricLBuehler/mistral.rs#2333: a first prompt longer than the first allocation or than the window.
#[test]
fn a_first_prompt_of_any_length_is_kept_as_far_as_the_window_reaches() {
    for first in [511, 512, 513, 1023, 1024, 1025, 2500] {
        let mut cache = LayerCache::new(LayerKind::Sliding { window: 1024 });
        assert_means(&feed(&mut cache, first).unwrap(), 0, 1024);
        assert_eq!(
            (cache.oldest(), cache.len()),
            (first.saturating_sub(1024), first)
        );
        assert_eq!(
            seen_next(&cache),
            ((first + 1).saturating_sub(1024)..first + 1).collect::<Vec<_>>()
        );
        for p in first..first + 3 {
            assert_means(&feed(&mut cache, 1).unwrap(), p, 1024);
        }
        assert_eq!(
            (cache.oldest(), cache.len()),
            ((first + 3).saturating_sub(1024), first + 3)
        );
        assert_eq!(
            seen_next(&cache),
            ((first + 4).saturating_sub(1024)..first + 4).collect::<Vec<_>>()
        );
    }
}

/// The positions that the next token may attend to, in order, and the next token's own.
fn seen_next(cache: &LayerCache) -> Vec<usize> {
    let (k, v) = kv(cache.len()..cache.len() + 1);
    let view = cache.fork().unwrap().append(&k, &v).unwrap();
    let rows: Vec<f32> = view
        .v
        .narrow(3, 0, 1)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap();
    let mut positions: Vec<_> = rows.iter().map(|&p| p as usize).collect();
    positions.sort_unstable();
    positions
}

/// Blaizzy/mlx-vlm#1748: cutting a wrapped ring by its logical length keeps arbitrary rows.
#[test]
fn a_wrapped_ring_refuses_to_go_back_and_an_unwrapped_one_continues_as_a_cold_run() {
    let kind = LayerKind::Sliding { window: 8 };
    let mut wrapped = LayerCache::new(kind);
    feed(&mut wrapped, 20).unwrap();
    let before = seen_next(&wrapped);
    assert!(!wrapped.can_truncate(5));
    insta::assert_snapshot!(message(wrapped.truncate(5).unwrap_err()), @"kv cache: can't go back to 5 of 20 tokens, positions before 12 are overwritten (Sliding { window: 8 })");
    assert_eq!(
        (wrapped.len(), seen_next(&wrapped)),
        (20, before),
        "a refusal changes nothing"
    );

    let mut unwrapped = LayerCache::new(kind);
    feed(&mut unwrapped, 6).unwrap();
    unwrapped.truncate(5).unwrap();
    assert_means(&feed(&mut unwrapped, 4).unwrap(), 5, 8);
    assert_means(&feed(&mut unwrapped, 1).unwrap(), 9, 8);
}

#[test]
fn going_back_is_allowed_exactly_while_the_next_token_still_finds_its_window() {
    let window = 8;
    for fed in 1..30 {
        for back_to in 0..=fed {
            let mut cache = LayerCache::new(LayerKind::Sliding { window });
            feed(&mut cache, fed).unwrap();
            let expected = fed <= window || back_to + 1 >= fed;
            assert_eq!(
                cache.can_truncate(back_to),
                expected,
                "{fed} fed, back to {back_to}"
            );
            if expected {
                cache.truncate(back_to).unwrap();
                for tokens in [1, 3, 1, 9, 1] {
                    let at = cache.len();
                    assert_means(&feed(&mut cache, tokens).unwrap(), at, window);
                }
            }
        }
    }
}

#[test]
fn a_fork_shares_no_memory_and_a_cleared_cache_starts_again() {
    for kind in [LayerKind::Full, LayerKind::Sliding { window: 8 }] {
        let window = if kind == LayerKind::Full {
            usize::MAX
        } else {
            8
        };
        let mut original = LayerCache::new(kind);
        feed(&mut original, 20).unwrap();
        let mut fork = original.fork().unwrap();
        let (k, v) = kv(900..907);
        fork.append(&k, &v).unwrap();
        assert_means(&feed(&mut original, 1).unwrap(), 20, window);
        original.clear();
        assert_eq!((original.len(), original.bytes()), (0, 0));
        assert_means(&feed(&mut original, 13).unwrap(), 0, window);
    }
}

#[test]
fn memory_follows_the_tokens_and_a_ring_stops_at_its_window() {
    let bytes_per_row = 2 * DIM * 4;
    let mut full = LayerCache::new(LayerKind::Full);
    feed(&mut full, 1).unwrap();
    assert_eq!(full.bytes(), 256 * bytes_per_row);
    feed(&mut full, 9_999).unwrap();
    assert!(
        full.bytes() <= 10_240 * bytes_per_row,
        "{} bytes for 10,000 rows",
        full.bytes()
    );
    let mut ring = LayerCache::new(LayerKind::Sliding { window: 1000 });
    feed(&mut ring, 1).unwrap();
    assert_eq!(ring.bytes(), 256 * bytes_per_row);
    feed(&mut ring, 5_000).unwrap();
    assert_eq!(ring.bytes(), 1000 * bytes_per_row);
    let mut reserved = LayerCache::new(LayerKind::Full);
    reserved.reserve(5_000);
    feed(&mut reserved, 1).unwrap();
    assert_eq!(reserved.bytes(), 5_120 * bytes_per_row);
}

#[test]
fn mismatched_keys_and_values_are_refused_and_nothing_is_stored() {
    let mut cache = LayerCache::new(LayerKind::Full);
    feed(&mut cache, 3).unwrap();
    let t = |shape: (usize, usize, usize, usize), dtype| {
        Tensor::zeros(shape, dtype, &Device::Cpu).unwrap()
    };
    let f32 = DType::F32;
    let cases = [
        (t((1, 1, 2, DIM), f32), t((1, 1, 1, DIM), f32)),
        (t((1, 1, 0, DIM), f32), t((1, 1, 0, DIM), f32)),
        (t((2, 1, 1, DIM), f32), t((2, 1, 1, DIM), f32)),
        (
            t((1, 1, 1, DIM), DType::BF16),
            t((1, 1, 1, DIM), DType::BF16),
        ),
        (t((1, 1, 1, DIM), f32), t((1, 1, 1, DIM), DType::F16)),
    ];
    let errors: Vec<_> = cases
        .iter()
        .map(|(k, v)| message(cache.append(k, v).unwrap_err()))
        .collect();
    insta::assert_snapshot!(errors.join("\n"), @r"
    kv cache: v is [1, 1, 1, 4] F32, want [1, 1, 2, 4] F32 as k
    kv cache: k is [1, 1, 0, 4], want at least one token
    kv cache: k is [2, 1, 1, 4] F32, want (1, 1, tokens, 4) F32 as what is held
    kv cache: k is [1, 1, 1, 4] BF16, want (1, 1, tokens, 4) F32 as what is held
    kv cache: v is [1, 1, 1, 4] F16, want [1, 1, 1, 4] F32 as k
    ");
    assert_means(&feed(&mut cache, 1).unwrap(), 3, usize::MAX);
}

#[test]
fn absurd_windows_and_reservations_do_not_panic() {
    let (k, v) = kv(0..1);
    let mut blind = LayerCache::new(LayerKind::Sliding { window: 0 });
    insta::assert_snapshot!(message(blind.append(&k, &v).unwrap_err()), @"kv cache: the window is 0, want at least the token itself");
    let mut ring = LayerCache::new(LayerKind::Sliding { window: usize::MAX });
    ring.reserve(usize::MAX);
    assert_eq!(ring.len(), 0);
    let mut held = LayerCache::new(LayerKind::Full);
    held.append(&k, &v).unwrap();
    insta::assert_snapshot!(message(held.truncate(2).unwrap_err()), @"kv cache: can't go back to 2 tokens, 1 are held");
}

/// Vector loads of f32 rows that start inside a cache line touch two.
#[test]
fn f32_rows_on_the_cpu_start_on_a_cache_line() {
    for kind in [LayerKind::Full, LayerKind::Sliding { window: 300 }] {
        let mut cache = LayerCache::new(kind);
        for tokens in [1, 400, 1, 3000, 1] {
            let at = cache.len();
            assert_means(
                &feed(&mut cache.fork().unwrap(), tokens).unwrap(),
                at,
                if kind == LayerKind::Full {
                    usize::MAX
                } else {
                    300
                },
            );
            let (k, v) = kv(at..at + tokens);
            let view = cache.append(&k, &v).unwrap();
            // A ring that overwrites what its own chunk needs answers with a copy.
            if tokens == 1 || kind == LayerKind::Full {
                for rows in [&view.k, &view.v] {
                    let (storage, layout) = rows.storage_and_layout();
                    let candle::Storage::Cpu(candle::CpuStorage::F32(values)) = &*storage else {
                        panic!("not f32")
                    };
                    assert_eq!(
                        values[layout.start_offset()..].as_ptr() as usize % 64,
                        0,
                        "{kind:?}, {tokens} tokens"
                    );
                }
            }
        }
    }
}

/// What was taken back stays in the buffers; no later token may read it.
#[test]
fn rows_that_were_taken_back_are_never_read() {
    for kind in [LayerKind::Full, LayerKind::Sliding { window: 8 }] {
        let window = match kind {
            LayerKind::Full => usize::MAX,
            LayerKind::Sliding { window } => window,
        };
        for next in [1, 2, 3, 12] {
            let mut cache = LayerCache::new(kind);
            feed(&mut cache, 4).unwrap();
            let poison = Tensor::full(f32::NAN, (1, 1, 4, DIM), &Device::Cpu).unwrap();
            cache.append(&poison, &poison).unwrap();
            cache.truncate(4).unwrap();
            for tokens in [next, 1, 9] {
                let at = cache.len();
                assert_means(&feed(&mut cache, tokens).unwrap(), at, window);
            }
        }
    }
    let mut values = LayerCache::values_only();
    let (_, v) = kv(0..4);
    values.append_values(&v).unwrap();
    let poison = Tensor::full(f32::NAN, (1, 1, 4, DIM), &Device::Cpu).unwrap();
    values.append_values(&poison).unwrap();
    values.truncate(4).unwrap();
    let (_, v) = kv(4..6);
    let held = values.append_values(&v).unwrap();
    let rows: Vec<f32> = held.flatten_all().unwrap().to_vec1().unwrap();
    assert!(rows.iter().all(|x| x.is_finite()), "{rows:?}");
    assert_eq!(rows.len(), 6 * DIM);
}
