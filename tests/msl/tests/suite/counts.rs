//! Counts of kernels whose traffic is known by hand.

use crate::support::run;
use msl::{Buffer, Dispatch, Flow, Mode, Module, SEEDS};

fn flow(accesses: u64, bytes: u64, unique_bytes: u64) -> Flow {
    Flow {
        accesses,
        bytes,
        unique_bytes,
    }
}

#[test]
fn bytes_are_counted_by_kind_of_memory_and_binding() {
    let text = include_str!("../kernels/traffic.metal");
    let module = Module::compile(&[("traffic.metal", text)], &[], Mode::Checked).unwrap();
    let (x, h) = (
        Buffer::new(&[1f32; 64]),
        Buffer::new(&[half::f16::ONE; 128]),
    );
    let mut y = Buffer::uninitialised(3 * 256);
    let mut dispatch = Dispatch::new("traffic", [3, 1, 1], [64, 1, 1])
        .input(0, &x)
        .input(1, &h)
        .output(2, &mut y)
        .value(3, 10u32);
    let stats = module.run_all_schedules(&mut dispatch, &SEEDS).unwrap();
    assert_eq!(
        (
            stats.threadgroups,
            stats.threads,
            stats.barriers,
            stats.collectives
        ),
        (3, 192, 3, 6)
    );
    assert_eq!(stats.threadgroup_bytes, 256);
    let memory = stats.memory.unwrap();
    // 3 groups of 64 threads: one float each; 10 halves each, of which the group touches 73.
    assert_eq!(memory.device[&0].read, flow(192, 768, 256));
    assert_eq!(memory.device[&1].read, flow(1920, 3840, 146));
    assert_eq!(memory.device[&2].written, flow(192, 768, 768));
    assert_eq!(memory.device[&2].read, flow(0, 0, 0));
    assert_eq!(memory.constant[&3].read.unique_bytes, 4);
    assert_eq!(memory.threadgroup.written, flow(192, 768, 768));
    // The first 10 floats of every group.
    assert_eq!(memory.threadgroup.read, flow(1920, 7680, 120));
    assert_eq!(memory.device_bytes(), 768 + 3840 + 768);
    assert_eq!(memory.unique_device_bytes(), 256 + 146 + 768);
}

#[test]
fn a_vector_is_loaded_and_stored_at_once() {
    let head = "device const float4 *v = (device const float4 *)a;\n";
    let body = "if (t < 16)\n((device float4 *)o)[15 - t] = v[t] * 2 + v[15 - t];";
    let (o, stats) = run(&format!("{head}{body}"), Mode::Checked).unwrap();
    assert_eq!(o[60..], [60.0, 63.0, 66.0, 69.0]);
    let memory = stats.memory.unwrap();
    assert_eq!(memory.device[&0].read, flow(32, 512, 256));
    assert_eq!(memory.device[&1].written, flow(16, 256, 256));
    // Whatever becomes of the components.
    for body in [
        "o[t] = dot(v[t / 4], float4(1, 2, 3, 4));",
        "float4 s = v[t / 4];\no[t] = s.x * s.y + s.w;",
        "o[t] = float(half4(v[t / 4]).z);",
        "o[t] = fma(v[t / 4], float4(2), float4(1)).x;",
    ] {
        let (_, stats) = run(&format!("{head}{body}"), Mode::Checked).unwrap();
        let memory = stats.memory.unwrap();
        assert_eq!(memory.device[&0].read, flow(64, 1024, 256), "{body}");
    }
}

#[test]
fn a_fast_module_counts_no_bytes() {
    let (_, stats) = run("o[t] = a[t];", Mode::Fast).unwrap();
    assert_eq!(stats.memory, None);
    assert_eq!(stats.threads, 64);
}
