//! The language and its library mean here what they mean in Metal.

use crate::reference::{matmul, max_error, to_f16, uniform, widen};
use crate::support::run;
use half::{bf16, f16};
use msl::{Buffer, Constant, Dispatch, Mode, Module, SEEDS};

/// The output of a body of `support::kernel`, the same in both modes.
#[track_caller]
fn both(body: &str) -> Vec<f32> {
    let (fast, _) = run(body, Mode::Fast).unwrap();
    let (checked, _) = run(body, Mode::Checked).unwrap();
    assert_eq!(fast, checked);
    fast
}

/// Both modes of one of `tests/kernels`.
fn modules(file: &str, text: &str, entries: &[&str]) -> [Module; 2] {
    let files = [
        ("params.h", include_str!("../kernels/params.h")),
        (file, text),
    ];
    [Mode::Fast, Mode::Checked].map(|mode| Module::compile(&files, entries, mode).unwrap())
}

#[test]
fn half_and_bfloat_round_after_every_operation() {
    // 2048 + 1 and 256 + 1 lie between two values of the type, and round to even.
    let half = both("half h = 2048.0h;\nh = h + 1.0h;\no[t] = float(h + 1.0h);");
    assert_eq!(half[0], 2048.0);
    let bfloat =
        both("bfloat b = bfloat(256.0f);\nb = b + bfloat(1.0f);\no[t] = float(b + bfloat(1.0f));");
    assert_eq!(bfloat[0], 256.0);
}

#[test]
fn a_literal_without_a_suffix_is_a_float() {
    // In double, the sum would keep the small term.
    assert_eq!(both("o[t] = (a[1] + 1e-8) - 1.0;")[0], 0.0);
}

#[test]
fn bits_of_the_16_bit_types_are_those_of_the_host() {
    let mut values = uniform(7, 1024);
    for (i, v) in values.iter_mut().enumerate() {
        *v *= 2f32.powi(i as i32 % 40 - 24);
    }
    values[..4].copy_from_slice(&[f32::INFINITY, -0.0, 1e-40, 65520.0]);
    let want_half: Vec<u16> = values.iter().map(|v| f16::from_f32(*v).to_bits()).collect();
    let want_bfloat: Vec<u16> = values
        .iter()
        .map(|v| bf16::from_f32(*v).to_bits())
        .collect();
    let text = include_str!("../kernels/sixteen_bit.metal");
    for module in modules("sixteen_bit.metal", text, &[]) {
        let x = Buffer::new(&values);
        let (mut h, mut b) = (Buffer::uninitialised(2048), Buffer::uninitialised(2048));
        let mut dispatch = Dispatch::new("narrow", [32, 1, 1], [32, 1, 1])
            .input(0, &x)
            .output(1, &mut h)
            .output(2, &mut b);
        module.run(&mut dispatch).unwrap();
        assert_eq!(h.to_vec::<u16>(), want_half);
        assert_eq!(b.to_vec::<u16>(), want_bfloat);
    }
}

#[test]
fn simd_functions_work_on_the_lanes_of_their_group() {
    let sum = both("o[t] = simd_sum(a[t]);");
    assert_eq!(sum[31..33], [496.0, 1520.0]);
    let ends = both("o[t] = simd_max(a[t]) + simd_min(a[t]);");
    assert_eq!(ends[31..33], [31.0, 95.0]);
    let exchanged = both("o[t] = simd_shuffle_xor(a[t], 5);");
    assert_eq!(exchanged[..3], [5.0, 4.0, 7.0]);
    let chosen = both("o[t] = simd_shuffle(a[t], 3) + simd_broadcast(a[t], 1);");
    assert_eq!(chosen[32], 35.0 + 33.0);
    let up = both("o[t] = simd_shuffle_up(a[t], 2);");
    assert_eq!(up[33..36], [33.0, 32.0, 33.0]);
    let down = both("o[t] = simd_shuffle_down(a[t], 2);");
    assert_eq!(down[28..31], [30.0, 31.0, 30.0]);
    let before = both("o[t] = simd_prefix_exclusive_sum(1u);");
    assert_eq!(before[32..35], [0.0, 1.0, 2.0]);
    let votes = both("o[t] = simd_any(t == 40) ? 1 : simd_all(t < 32) ? 2 : 3;");
    assert_eq!(votes[31..33], [2.0, 1.0]);
    let vector = both("o[t] = simd_sum(float4(a[t], 1, 2, 3)).w + simd_broadcast_first(a[t]);");
    assert_eq!(vector[63], 96.0 + 32.0);
}

#[test]
fn lanes_that_returned_take_no_part() {
    let out = both("o[t] = 0;\nif (lane >= 4) return;\no[t] = simd_sum(1.0f);");
    assert_eq!(out[..5], [4.0, 4.0, 4.0, 4.0, 0.0]);
}

#[test]
fn vectors_have_swizzles_and_componentwise_operators() {
    let out = both(
        r"float4 v = ((device const float4 *)a)[t / 4];
v.xy = v.yx;
v.zw += float2(1, 2);
v *= 2;
const half4 h = half4(v);
float2 p = v.lo + float2(h.hi);
o[t] = t % 2 ? dot(p, float2(1)) : select(v, -v, v > 3.0f).w + clamp(v.x, 0.0, 1.5);",
    );
    // v = (0, 1, 2, 3) becomes (2, 0, 6, 10), and p (8, 10).
    assert_eq!(out[..2], [-8.5, 18.0]);
}

#[test]
fn atomics_add_up() {
    let text = include_str!("../kernels/atomics.metal");
    for module in modules("atomics.metal", text, &[]) {
        let mut n = Buffer::new(&[0u32]);
        let mut dispatch = Dispatch::new("largest_sum", [3, 1, 1], [64, 1, 1]).in_out(0, &mut n);
        module.run_all_schedules(&mut dispatch, &SEEDS).unwrap();
        assert_eq!(n.to_vec::<u32>(), [63 * 64 / 2]);
    }
}

#[test]
fn function_constants_templates_headers_and_parameters_reach_the_kernel() {
    let x: Vec<f32> = (0..40).map(|i| i as f32).collect();
    let params: Vec<u8> = [40u32.to_ne_bytes(), 0.5f32.to_ne_bytes()].concat();
    let text = include_str!("../kernels/reverse.metal");
    for module in modules("reverse.metal", text, &["reverse_half_200"]) {
        let x = Buffer::new(&to_f16(&x));
        for (constants, add) in [(vec![], 7.0), (vec![(0, Constant::U32(40))], 40.0)] {
            let mut y = Buffer::uninitialised(320);
            let mut dispatch = Dispatch::new("reverse_half_200", [1, 2, 1], [64, 1, 1])
                .input(0, &x)
                .output(1, &mut y)
                .bytes(2, &params)
                .threadgroup_memory(80);
            dispatch.constants = constants;
            module.run(&mut dispatch).unwrap();
            let y: Vec<f32> = y.to_vec();
            assert_eq!((y[0], y[79]), (19.5 + 200.0 + add, 200.0 + add + 1.0));
        }
        let mut left_out = Dispatch::new("reverse_float_100", [1, 1, 1], [1, 1, 1]);
        let error = module.run(&mut left_out).unwrap_err().to_string();
        assert!(error.contains("no such kernel"), "{error}");
    }
}

/// `values` rounded to a type of the kernels, and in device memory.
fn rounded(values: &[f32], scalar: &str) -> (Vec<f32>, Buffer) {
    match scalar {
        "half" => {
            let narrow = to_f16(values);
            let wide = narrow.iter().map(|v| v.to_f32()).collect();
            (wide, Buffer::new(&narrow))
        }
        "bfloat" => {
            let narrow: Vec<bf16> = values.iter().map(|v| bf16::from_f32(*v)).collect();
            let wide = narrow.iter().map(|v| v.to_f32()).collect();
            (wide, Buffer::new(&narrow))
        }
        _ => (values.to_vec(), Buffer::new(values)),
    }
}

#[test]
fn simdgroup_matrices_multiply_in_float() {
    let text = include_str!("../kernels/matrix.metal");
    for module in modules("matrix.metal", text, &[]) {
        for (scalar, bytes) in [("float", 4), ("half", 2), ("bfloat", 2)] {
            let (a, left) = rounded(&uniform(8, 8 * 24), scalar);
            let (b, right) = rounded(&uniform(9, 8 * 24), scalar);
            let mut c = Buffer::uninitialised(256);
            let entry = format!("multiply_{scalar}");
            let mut dispatch = Dispatch::new(&entry, [1, 1, 1], [32, 1, 1])
                .input(0, &left)
                .input(1, &right)
                .output(2, &mut c)
                .threadgroup_memory(8 * 24 * bytes);
            let stats = module.run_all_schedules(&mut dispatch, &SEEDS).unwrap();
            assert_eq!(stats.matrix_multiplies, 3);
            let product = matmul(&a, |i, j| b[j * 24 + i], 8, 8);
            let want: Vec<f64> = product.iter().map(|v| v + 1.0).collect();
            assert!(max_error(widen(&c.to_vec::<f32>()), &want) < 4e-6);
        }
    }
}
