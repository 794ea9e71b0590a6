//! Short ways to state a kernel and a dispatch.

use msl::{Buffer, Dispatch, Error, Mode, Module, Stats};

/// A file `name.metal` with one kernel `k` of a body that starts on line 4. It takes `a`, an input of 64 floats, and
/// `o`, an output of 64 floats; `t` is the thread in the threadgroup, `lane` its lane, `g` the threadgroup.
pub fn kernel(body: &str) -> String {
    format!(
        "#include <metal_stdlib>\nusing namespace metal;\n\
         kernel void k(device const float *a [[buffer(0)]], device float *o [[buffer(1)]], uint t [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]], uint g [[threadgroup_position_in_grid]]) {{\n\
         {body}\n}}\n"
    )
}

pub fn ramp() -> Buffer {
    Buffer::new(&(0..64).map(|i| i as f32).collect::<Vec<_>>())
}

/// Runs [`kernel`] in one threadgroup of 64 threads.
pub fn run(body: &str, mode: Mode) -> Result<(Vec<f32>, Stats), Error> {
    let module = Module::compile(&[("k.metal", &kernel(body))], &[], mode)?;
    let (a, mut o) = (ramp(), Buffer::uninitialised(256));
    let mut dispatch = Dispatch::new("k", [1, 1, 1], [64, 1, 1])
        .input(0, &a)
        .output(1, &mut o);
    let stats = module.run(&mut dispatch)?;
    Ok((o.to_vec(), stats))
}

/// The reports of a kernel that must be at fault.
pub fn reports(result: Result<(Vec<f32>, Stats), Error>) -> Vec<String> {
    match result {
        Err(Error::Kernel { entry, reports }) => {
            assert_eq!(entry, "k");
            reports
        }
        other => panic!("expected a fault of the kernel, got {other:?}"),
    }
}
