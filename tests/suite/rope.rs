//! Rotary tables: which pairs turn, how fast, and that no position is lost to rounding.

use crate::common::message;
use candle::{DType, Device, Tensor};
use gem::models::gemma4::{Rope, RopeConfig};

fn full() -> Rope {
    Rope::new(
        &RopeConfig {
            theta: 1e6,
            rotated_pairs: 64,
            factor: 1.0,
        },
        512,
    )
}

fn sliding() -> Rope {
    Rope::new(
        &RopeConfig {
            theta: 1e4,
            rotated_pairs: 128,
            factor: 1.0,
        },
        256,
    )
}

fn cos_sin(rope: &Rope, position: usize) -> (Vec<f32>, Vec<f32>) {
    let (cos, sin) = rope.cos_sin(position, 1, &Device::Cpu).unwrap();
    (
        cos.flatten_all().unwrap().to_vec1().unwrap(),
        sin.flatten_all().unwrap().to_vec1().unwrap(),
    )
}

/// A head with a 1 in `lane`, rotated to `position`.
fn rotated_unit(rope: &Rope, lane: usize, position: usize) -> Vec<f32> {
    let dim = 2 * rope.inv_freq().len();
    let mut x = vec![0f32; dim];
    x[lane] = 1.0;
    let x = Tensor::from_vec(x, (1, 1, 1, dim), &Device::Cpu).unwrap();
    let (cos, sin) = rope.cos_sin(position, 1, &Device::Cpu).unwrap();
    candle_nn::rotary_emb::rope(&x, &cos, &sin)
        .unwrap()
        .flatten_all()
        .unwrap()
        .to_vec1()
        .unwrap()
}

/// NVIDIA-NeMo/Megatron-Bridge#4195: 64 of 256 pairs turn, the exponent runs over 512, lane i is paired with i + 256.
#[test]
fn proportional_frequencies_run_over_the_whole_head() {
    let rope = full();
    let freq = rope.inv_freq();
    assert_eq!(freq.len(), 256);
    assert_eq!(freq[0], 1.0);
    assert!((freq[1] - 0.947464).abs() < 1e-6, "{}", freq[1]);
    assert!((freq[63] - 0.0333762).abs() < 1e-7, "{}", freq[63]);
    assert!(freq[64..].iter().all(|&f| f == 0.0));
}

#[test]
fn a_lane_turns_with_its_partner_half_a_head_away_or_not_at_all() {
    let y = rotated_unit(&full(), 10, 1);
    for (lane, &value) in y.iter().enumerate() {
        let want = match lane {
            10 => 0.834847,
            266 => 0.550482,
            _ => 0.0,
        };
        assert!(
            (value - want).abs() < 1e-6,
            "lane {lane}: {value}, want {want}"
        );
    }
    for position in [1, 1000, 131_071] {
        let y = rotated_unit(&full(), 100, position);
        assert_eq!(
            y.iter().position(|&v| v == 1.0),
            Some(100),
            "position {position}"
        );
        assert_eq!(
            y.iter().filter(|&&v| v != 0.0).count(),
            1,
            "position {position}"
        );
    }
}

/// huggingface/candle#3520: with positions rounded to bf16, 257 becomes 256.
#[test]
fn angles_are_exact_at_positions_that_half_types_cannot_hold() {
    for (position, want) in [
        (257, 0.8193),
        (4097, 0.9348),
        (15_962, -0.9080),
        (131_071, -0.8180),
    ] {
        let (cos, _) = cos_sin(&sliding(), position);
        assert!(
            (cos[0] - want).abs() < 1e-4,
            "position {position}: {}, want {want}",
            cos[0]
        );
    }
    for rope in [sliding(), full()] {
        assert_ne!(cos_sin(&rope, 256), cos_sin(&rope, 257));
        for position in [4095usize, 15_962, 131_071, 262_143] {
            let (cos, sin) = cos_sin(&rope, position);
            for (pair, &frequency) in rope.inv_freq().iter().enumerate() {
                let angle = position as f64 * frequency;
                assert!(
                    (cos[pair] as f64 - angle.cos()).abs() < 1e-7,
                    "cos of pair {pair} at {position}"
                );
                assert!(
                    (sin[pair] as f64 - angle.sin()).abs() < 1e-7,
                    "sin of pair {pair} at {position}"
                );
            }
        }
    }
}

#[test]
fn tables_of_a_range_are_those_of_its_positions() {
    let (cos, sin) = full().cos_sin(1000, 3, &Device::Cpu).unwrap();
    assert_eq!(
        (cos.dims(), cos.dtype(), sin.dims()),
        (
            [3usize, 256].as_slice(),
            DType::F32,
            [3usize, 256].as_slice()
        )
    );
    for i in 0..3 {
        let row: Vec<f32> = cos.get(i).unwrap().to_vec1().unwrap();
        assert_eq!(row, cos_sin(&full(), 1000 + i).0);
    }
}

#[test]
fn a_factor_divides_every_frequency() {
    let stretched = Rope::new(
        &RopeConfig {
            theta: 1e6,
            rotated_pairs: 64,
            factor: 8.0,
        },
        512,
    );
    for (a, b) in stretched.inv_freq().iter().zip(full().inv_freq()) {
        assert_eq!(*a, b / 8.0);
    }
}

#[test]
fn positions_that_no_number_or_memory_holds_are_an_error() {
    let refused = |start, len| message(full().cos_sin(start, len, &Device::Cpu).unwrap_err());
    insta::assert_snapshot!(refused(0, usize::MAX), @"rope: 18446744073709551615 positions of 256 pairs would take 18889465931478580853760 bytes, which passes the 64-bit address range");
    insta::assert_snapshot!(refused(0, 1 << 44), @"rope: no memory for 17592186044416 positions of 256 pairs, which would take 18014398509481984 bytes");
    insta::assert_snapshot!(refused(usize::MAX, 1), @"rope: 1 positions from 18446744073709551615 on pass the 64-bit range");
    let (cos, _) = full().cos_sin(usize::MAX - 1, 1, &Device::Cpu).unwrap();
    assert_eq!(cos.dims(), [1, 256]);
}
