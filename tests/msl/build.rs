//! Finds the source of candle-metal-kernels, whose kernels the tests run. It is a dependency for macOS only, so that
//! cargo does not fetch it elsewhere; `cargo metadata` for that target does. This happens when the tests are built,
//! where cargo may fetch anyway: the tests themselves need no network.

use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=Cargo.toml");
    let found = locate(&["--offline"]).or_else(|_| locate(&[]));
    match found {
        Ok(folder) => {
            // A build folder that moved to another machine points to nothing: look again there.
            println!("cargo:rerun-if-changed={folder}/Cargo.toml");
            println!("cargo:rustc-env=MSL_CANDLE_KERNELS={folder}/src/metal_src");
            println!("cargo:rustc-env=MSL_CANDLE_KERNELS_ERROR=");
        }
        Err(reason) => {
            let reason = reason.replace('\n', " ");
            println!("cargo:rustc-env=MSL_CANDLE_KERNELS=");
            println!("cargo:rustc-env=MSL_CANDLE_KERNELS_ERROR={reason}");
        }
    }
}

fn locate(more: &[&str]) -> Result<String, String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["metadata", "--format-version", "1", "--locked"])
        .args(["--filter-platform", "aarch64-apple-darwin"])
        .args(more)
        .output()
        .map_err(|e| format!("cargo metadata: {e}"))?;
    if !output.status.success() {
        let message = String::from_utf8_lossy(&output.stderr);
        return Err(format!("cargo metadata: {}", message.trim()));
    }
    let json = String::from_utf8_lossy(&output.stdout);
    // One field of the document: not worth a JSON parser in the build.
    json.split("\"manifest_path\":\"")
        .skip(1)
        .filter_map(|rest| rest.split_once("/Cargo.toml\""))
        .map(|(folder, _)| folder)
        .find(|folder| folder.contains("/candle-metal-kernels-"))
        .map(str::to_string)
        .ok_or_else(|| "cargo metadata lists no candle-metal-kernels".to_string())
}
