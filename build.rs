//! With the feature `cuda`: compiles the kernels of `cuda/` for the GPU of this machine, or for `CUDA_COMPUTE_CAP`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    #[cfg(feature = "cuda")]
    if let Err(why) = cuda::build() {
        eprintln!("the kernels of cuda/ do not compile: {why}");
        std::process::exit(1);
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use std::path::PathBuf;
    use std::process::{Child, Command};

    const SOURCES: [&str; 6] = [
        "attention_d512",
        "attention_matrix",
        "attention_tiled",
        "attention_states",
        "projection",
        "qsa_prep",
    ];

    pub fn build() -> Result<(), Box<dyn std::error::Error>> {
        println!("cargo::rerun-if-changed=cuda");
        println!("cargo::rerun-if-changed=metal/gem.h");
        println!("cargo::rerun-if-env-changed=CUDA_COMPUTE_CAP");
        println!("cargo::rerun-if-env-changed=NVCC");
        let out = PathBuf::from(std::env::var("OUT_DIR")?);
        // As candle's kernels: asks nvidia-smi where the variable is not set.
        let cap = cudaforge::detect_compute_cap()
            .map_err(|why| {
                format!("no compute capability ({why}), want nvidia-smi to run or CUDA_COMPUTE_CAP to be set, 90 for an H200")
            })?
            .base();
        if cap < 80 {
            return Err(format!("compute capability is {cap}, want at least 80").into());
        }
        let started: Vec<(&str, Child)> = SOURCES
            .iter()
            .map(|&source| {
                let child = Command::new(nvcc())
                    .args(["-fatbin", "-std=c++17", "-O3"])
                    // Machine code for this GPU, and what later ones compile.
                    .arg(format!(
                        "-gencode=arch=compute_{cap},code=[sm_{cap},compute_{cap}]"
                    ))
                    .arg(format!("cuda/{source}.cu"))
                    .arg("-o")
                    .arg(out.join(format!("{source}.fatbin")))
                    .spawn();
                match child {
                    Ok(child) => Ok((source, child)),
                    Err(why) => Err(format!(
                        "{} can't be run ({why}), want nvcc of the CUDA toolkit on the PATH, or NVCC or CUDA_HOME to say where it is",
                        nvcc().display()
                    )),
                }
            })
            .collect::<Result<_, _>>()?;
        for (source, mut child) in started {
            if !child.wait()?.success() {
                return Err(format!("nvcc fails on cuda/{source}.cu").into());
            }
        }
        Ok(())
    }

    fn nvcc() -> PathBuf {
        if let Ok(nvcc) = std::env::var("NVCC") {
            return nvcc.into();
        }
        let homes = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];
        let mut found = homes
            .iter()
            .filter_map(|home| std::env::var(home).ok())
            .map(|home| PathBuf::from(home).join("bin/nvcc"));
        match found.find(|nvcc| nvcc.exists()) {
            Some(nvcc) => nvcc,
            None => "nvcc".into(),
        }
    }
}
