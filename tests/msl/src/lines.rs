//! Code addresses to lines of the `.metal` text.

use std::collections::HashMap;
use std::path::Path;
use std::process::Command;

use crate::compiler::SHIM;

/// Replaces each `@hex` by `file:line`.
pub fn resolve(message: &str, library: &Path) -> String {
    let parts: Vec<&str> = message.split('@').collect();
    let addresses: Vec<&str> = parts[1..].iter().map(|part| split_hex(part).0).collect();
    if addresses.is_empty() {
        return message.to_string();
    }
    let lines = lookup(&addresses, library);
    let mut out = parts[0].to_string();
    for part in &parts[1..] {
        let (address, rest) = split_hex(part);
        let line = u64::from_str_radix(address, 16)
            .ok()
            .and_then(|a| lines.get(&a));
        out.push_str(line.map_or("line unknown (is addr2line of binutils on PATH?)", |l| l));
        out.push_str(rest);
    }
    out
}

fn split_hex(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_hexdigit());
    text.split_at(end.unwrap_or(text.len()))
}

fn lookup(addresses: &[&str], library: &Path) -> HashMap<u64, String> {
    // -i lists the inlined callers, innermost first; -a puts the address in front of them.
    let output = Command::new("addr2line")
        .args(["-a", "-i", "-e"])
        .arg(library)
        .args(addresses)
        .output();
    let mut lines = HashMap::new();
    let Ok(output) = output else {
        return lines;
    };
    let mut address = None;
    for frame in String::from_utf8_lossy(&output.stdout).lines() {
        if let Some(hex) = frame.strip_prefix("0x") {
            address = u64::from_str_radix(hex, 16).ok();
        } else if let (Some(address), Some(line)) = (address, in_the_text(frame)) {
            lines.entry(address).or_insert(line);
        }
    }
    lines
}

/// `file:line` of a frame, unless it is in the shim.
fn in_the_text(frame: &str) -> Option<String> {
    let frame = frame.split(" (").next().unwrap_or(frame);
    let place = frame.rsplit('/').next().unwrap_or(frame);
    let (file, line) = place.split_once(':')?;
    let in_shim = SHIM.iter().any(|(name, _)| *name == file);
    let known = line.parse::<u32>().is_ok_and(|n| n > 0);
    (!in_shim && known).then(|| place.to_string())
}
