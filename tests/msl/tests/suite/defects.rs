//! Small kernels with one fault each: every fault is found, with its line; the same kernel without it passes.

use crate::support::{kernel, ramp, reports, run};
use msl::{Buffer, Dispatch, Error, Limits, Mode, Module};

/// Asserts that the body is at fault in `mode`, and that a report has all of `parts`.
#[track_caller]
fn is_found(body: &str, mode: Mode, parts: &[&str]) {
    let reports = reports(run(body, mode));
    let hit = reports.iter().any(|r| parts.iter().all(|p| r.contains(p)));
    assert!(hit, "no report with all of {parts:?} in {reports:#?}");
}

#[track_caller]
fn passes(body: &str) {
    for mode in [Mode::Fast, Mode::Checked] {
        run(body, mode).unwrap_or_else(|e| panic!("{mode:?}: {e}"));
    }
}

const EXCHANGE: &str = "threadgroup float s[64];\ns[t] = a[t];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[t] = s[63 - t];";

#[test]
fn an_exchange_with_its_barrier_passes() {
    passes(EXCHANGE);
    let (o, _) = run(EXCHANGE, Mode::Fast).unwrap();
    assert_eq!((o[0], o[63]), (63.0, 0.0));
}

#[test]
fn a_missing_barrier_is_a_race_with_both_lines() {
    let body = "threadgroup float s[64];\ns[t] = a[t];\no[t] = s[63 - t];";
    is_found(
        body,
        Mode::Checked,
        &[
            "race (read after write)",
            "memory s byte",
            "k.metal:6 against",
            "k.metal:5",
        ],
    );
}

#[test]
fn a_barrier_that_does_not_name_the_memory_is_a_race_and_is_named() {
    let body = EXCHANGE.replace("mem_threadgroup", "mem_device");
    is_found(
        &body,
        Mode::Checked,
        &[
            "k.metal:7 against thread 0, k.metal:5",
            "barrier at k.metal:6",
            "does not name mem_flags::mem_threadgroup",
        ],
    );
    let through_device = "o[t] = a[t];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nfloat x = o[63 - t];\nthreadgroup_barrier(mem_flags::mem_device);\no[t] = x;";
    is_found(
        through_device,
        Mode::Checked,
        &[
            "buffer 1 byte",
            "k.metal:6 against",
            "k.metal:4",
            "barrier at k.metal:5",
            "mem_flags::mem_device",
        ],
    );
    passes(&through_device.replace("mem_threadgroup", "mem_device"));
}

#[test]
fn overwriting_what_others_still_read_is_a_race() {
    let body = "threadgroup float s[64];\ns[t] = a[t];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nfloat x = s[63 - t];\ns[t] = x;\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[t] = s[t];";
    is_found(
        body,
        Mode::Checked,
        &["race (write after read)", "k.metal:8 against", "k.metal:7"],
    );
}

#[test]
fn two_threads_that_store_different_values_race_and_equal_values_do_not() {
    is_found(
        "o[0] = a[t];",
        Mode::Checked,
        &["race (two writes)", "buffer 1 byte 0", "k.metal:4 against"],
    );
    passes("o[0] = a[5];");
}

#[test]
fn lanes_need_a_simdgroup_barrier_between_them() {
    let body = "threadgroup float s[64];\ns[t] = a[t];\n\no[t] = s[t ^ 1];";
    is_found(
        body,
        Mode::Checked,
        &["race (read after write)", "k.metal:7 against"],
    );
    passes(&body.replace("\n\n", "\nsimdgroup_barrier(mem_flags::mem_threadgroup);\n"));
}

#[test]
fn reads_of_the_own_simd_group_are_over_after_its_barrier() {
    let body = "threadgroup float s[64];\ns[t] = a[t];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\nfloat x = s[t ^ 1];\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ns[t] = s[t] + x;\no[t] = s[t];";
    passes(body);
    let early = body.replace(
        "x = s[t ^ 1];\nsimdgroup_barrier(mem_flags::mem_threadgroup);",
        "x = s[t ^ 1];\n",
    );
    is_found(
        &early,
        Mode::Checked,
        &["race (write after read)", "k.metal:9", "k.metal:7"],
    );
}

#[test]
fn threadgroups_race_on_device_memory() {
    let body = "o[t] = a[t] + g;";
    let module = Module::compile(&[("k.metal", &kernel(body))], &[], Mode::Checked).unwrap();
    let (a, mut o) = (ramp(), Buffer::uninitialised(256));
    let mut dispatch = Dispatch::new("k", [2, 1, 1], [64, 1, 1])
        .input(0, &a)
        .output(1, &mut o);
    let error = module.run(&mut dispatch).unwrap_err().to_string();
    assert!(
        error.contains("race (two writes): buffer 1 byte 0") && error.contains("k.metal:4 against"),
        "{error}"
    );
}

#[test]
fn a_barrier_that_some_threads_do_not_reach_is_divergence() {
    let body = "if (t < 40)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[t] = a[t];";
    for mode in [Mode::Fast, Mode::Checked] {
        is_found(
            body,
            mode,
            &[
                "cannot meet",
                "threads 0..39 wait at threadgroup_barrier, k.metal:5",
                "threads 40..63 returned",
            ],
        );
    }
}

#[test]
fn two_barriers_at_once_are_divergence() {
    let body = "if (t < 32)\nthreadgroup_barrier(mem_flags::mem_threadgroup);\nelse\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[t] = a[t];";
    is_found(
        body,
        Mode::Fast,
        &["different barriers", "k.metal:5", "k.metal:7"],
    );
}

#[test]
fn a_simd_function_that_some_lanes_do_not_reach_is_divergence() {
    let both =
        "float x = a[t];\nif (lane < 8)\nx = simd_sum(x);\nelse\nx = simd_max(x);\no[t] = x;";
    is_found(both, Mode::Fast, &["diverge", "k.metal:6", "k.metal:8"]);
    let some = "float x = a[t];\nif (lane < 8)\nx = simd_sum(x);\nsimdgroup_barrier(mem_flags::mem_none);\no[t] = x;";
    is_found(
        some,
        Mode::Fast,
        &[
            "diverge",
            "a SIMD reduction, k.metal:6",
            "simdgroup_barrier, k.metal:7",
        ],
    );
}

#[test]
fn a_shuffle_from_a_lane_that_returned_is_found() {
    let body = "if (lane >= 16) return;\no[t] = simd_shuffle(a[t], 20);";
    is_found(body, Mode::Fast, &["shuffle at k.metal:5 reads lane 20"]);
}

#[test]
fn an_access_out_of_bounds_names_buffer_byte_and_line() {
    for (body, parts) in [
        (
            "o[t] = a[t + 1];",
            ["buffer 0 byte 256 of 256", "k.metal:4"],
        ),
        (
            "\no[t + 1] = a[t];",
            ["buffer 1 byte 256 of 256", "k.metal:5"],
        ),
    ] {
        for mode in [Mode::Fast, Mode::Checked] {
            is_found(body, mode, &parts);
        }
    }
    // In front of a buffer a fast kernel may still meet the machine's page.
    is_found(
        "o[t] = a[(int)t - 1];",
        Mode::Checked,
        &["buffer 0 byte -4 of 256", "k.metal:4"],
    );
}

#[test]
fn an_index_past_a_threadgroup_variable_is_found() {
    let body = "threadgroup float s[64], z[64];\nthreadgroup float *p = s;\np[t + 1] = a[t];\nz[t] = 0;\no[t] = p[t + 1];";
    is_found(
        body,
        Mode::Checked,
        &[
            "write out of bounds",
            "threadgroup memory s byte 256 of 256",
            "k.metal:6",
        ],
    );
    let fixed = "threadgroup float s[64];\ns[t + 1] = a[t];\no[t] = s[t + 1];";
    is_found(
        fixed,
        Mode::Checked,
        &["index 64 is outside a fixed array", "k.metal:5"],
    );
}

#[test]
fn a_read_of_what_nobody_wrote_is_found() {
    let shared = "threadgroup float s[128];\ns[t] = a[t];\nthreadgroup_barrier(mem_flags::mem_threadgroup);\no[t] = s[t + 1];";
    is_found(
        shared,
        Mode::Checked,
        &[
            "uninitialised",
            "threadgroup memory s byte 256 of 512",
            "k.metal:7",
        ],
    );
    is_found(
        "o[t] += a[t];",
        Mode::Checked,
        &["uninitialised", "buffer 1 byte 0", "k.metal:4"],
    );
}

#[test]
fn what_the_first_pass_left_out_is_uninitialised_in_the_second() {
    let module = Module::compile(
        &[("k.metal", &kernel("if (t != 7) o[t] = a[t];"))],
        &[],
        Mode::Checked,
    )
    .unwrap();
    let (a, mut between, mut o) = (
        ramp(),
        Buffer::uninitialised(256),
        Buffer::uninitialised(256),
    );
    module
        .run(
            &mut Dispatch::new("k", [1, 1, 1], [64, 1, 1])
                .input(0, &a)
                .output(1, &mut between),
        )
        .unwrap();
    assert_eq!(between.unwritten_bytes(), 4);
    let second =
        Module::compile(&[("k.metal", &kernel("o[t] = a[t];"))], &[], Mode::Checked).unwrap();
    let error = second
        .run(
            &mut Dispatch::new("k", [1, 1, 1], [64, 1, 1])
                .input(0, &between)
                .output(1, &mut o),
        )
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("uninitialised") && error.contains("buffer 0 byte 28"),
        "{error}"
    );
}

#[test]
fn a_write_to_an_input_names_the_buffer_and_the_line() {
    let body = "((device float *)a)[t] = 1;\no[t] = 0;";
    for mode in [Mode::Fast, Mode::Checked] {
        is_found(
            body,
            mode,
            &["write to an input", "buffer 0 byte 0", "k.metal:4"],
        );
    }
}

#[test]
fn a_misaligned_vector_is_found() {
    let body = "float4 s = ((device const float4 *)(a + 1))[t / 8];\no[t] = s.x + s.y;";
    is_found(
        body,
        Mode::Checked,
        &[
            "misaligned",
            "buffer 0 byte 4",
            "k.metal:4",
            "divisible by 16",
        ],
    );
}

#[test]
fn integer_division_by_zero_is_found() {
    let body = "o[t] = (int)a[t] / (int)a[0];";
    for mode in [Mode::Fast, Mode::Checked] {
        is_found(body, mode, &["integer division by zero", "k.metal:4"]);
    }
}

#[test]
fn too_much_threadgroup_memory_is_found() {
    let body = "threadgroup float s[8193];\ns[t] = a[t];\no[t] = s[t];";
    for mode in [Mode::Fast, Mode::Checked] {
        is_found(
            body,
            mode,
            &["32784 bytes of threadgroup memory with s, the limit is 32768"],
        );
    }
    passes(&body.replace("8193", "8192"));
}

#[test]
fn a_missing_barrier_shows_as_a_difference_between_schedules_without_instrumentation() {
    let body = "threadgroup float s[64];\ns[t] = 1;\nsimdgroup_barrier(mem_flags::mem_threadgroup);\ns[t] = a[t];\no[t] = s[63 - t];";
    let module = Module::compile(&[("k.metal", &kernel(body))], &[], Mode::Fast).unwrap();
    let (a, mut o) = (ramp(), Buffer::uninitialised(256));
    let mut dispatch = Dispatch::new("k", [1, 1, 1], [64, 1, 1])
        .input(0, &a)
        .output(1, &mut o);
    let error = module
        .run_all_schedules(&mut dispatch, &msl::SEEDS)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("seeds 0 and") && error.contains("buffer 1 differs"),
        "{error}"
    );
}

/// The error of a dispatch of `o[t] = a[t]` that `change` makes unfit.
fn refusal(change: impl for<'a> FnOnce(Dispatch<'a>) -> Dispatch<'a>) -> String {
    let module = Module::compile(&[("k.metal", &kernel("o[t] = a[t];"))], &[], Mode::Fast).unwrap();
    let (a, mut o) = (ramp(), Buffer::uninitialised(256));
    let dispatch = Dispatch::new("k", [1, 1, 1], [64, 1, 1])
        .input(0, &a)
        .output(1, &mut o);
    match module.run(&mut change(dispatch)) {
        Err(error @ Error::Dispatch { .. }) => error.to_string(),
        other => panic!("expected a refusal, got {other:?}"),
    }
}

#[test]
fn a_dispatch_that_does_not_fit_is_refused() {
    let too_many = refusal(|mut d| {
        d.limits = Limits {
            threads: 32,
            ..Limits::default()
        };
        d
    });
    assert_eq!(
        too_many,
        "msl: kernel k: 64 threads per threadgroup, the limit is 32"
    );
    let unknown = refusal(|d| d.value(5, 1u32));
    assert_eq!(
        unknown,
        "msl: kernel k: buffer 5 is bound, but is no argument of the kernel"
    );
    let twice = refusal(|d| d.value(1, 1u32));
    assert_eq!(twice, "msl: kernel k: buffer 1 is bound twice");
    let memory = refusal(|d| d.threadgroup_memory(64));
    assert_eq!(
        memory,
        "msl: kernel k: threadgroup(0) has a size, but is no argument of the kernel"
    );
    let constant = refusal(|d| d.constant(3, msl::Constant::Bool(true)));
    assert_eq!(
        constant,
        "msl: kernel k: function constant 3 is not in the texts"
    );
    let offset = refusal(|d| d.offset(257));
    assert_eq!(offset, "msl: kernel k: buffer 1: offset 257 of 256 bytes");
    let name = refusal(|mut d| {
        d.entry = "other";
        d
    });
    assert_eq!(name, "msl: kernel other: the module has no such kernel");
}

#[test]
fn a_text_that_does_not_compile_names_its_line() {
    let error = run("o[t] = b[t];", Mode::Fast).unwrap_err().to_string();
    assert!(
        error.contains("k.metal:4") && error.contains("'b'"),
        "{error}"
    );
}

#[test]
fn a_text_can_include_only_what_is_given() {
    let text = "#include \"gem.h\"\n#include \"other.h\"\n";
    let error = Module::compile(&[("gem.h", ""), ("k.metal", text)], &[], Mode::Fast)
        .err()
        .unwrap();
    let error = error.to_string();
    assert!(
        error.contains("k.metal:2") && error.contains("other.h"),
        "{error}"
    );
}
