//! What a GPU is asked to do, as data, and what does it.

#[cfg(feature = "cuda")]
pub mod cuda;
pub(crate) mod limits;
#[cfg(feature = "metal")]
pub mod metal;
pub mod params;
pub mod plan;
pub mod receipt;

/// Why an op can't run where its inputs are. Never a fallback: a copy to the CPU would be silent and slow.
pub(crate) fn no_code_for(op: &str, inputs: &str, device: &str) -> candle::Error {
    let there = match (cfg!(feature = "metal"), cfg!(feature = "cuda")) {
        (false, false) => "the CPU, and for Metal and CUDA with the features `metal` and `cuda`",
        (true, false) => "the CPU and Metal, and for CUDA with the feature `cuda`",
        (false, true) => "the CPU and CUDA, and for Metal with the feature `metal`",
        (true, true) => "the CPU, Metal and CUDA",
    };
    candle::Error::Msg(format!(
        "{op}: {inputs} are on a {device} device, there is code for {there}"
    ))
}

#[cfg(all(test, not(any(feature = "metal", feature = "cuda"))))]
mod tests {
    use super::no_code_for;

    #[test]
    fn a_device_without_code_is_named_together_with_those_that_have_it() {
        insta::assert_snapshot!(
            no_code_for("attention_d512", "q, k and v", "CUDA").to_string(),
            @"attention_d512: q, k and v are on a CUDA device, there is code for the CPU, and for Metal and CUDA with the features `metal` and `cuda`"
        );
    }
}
