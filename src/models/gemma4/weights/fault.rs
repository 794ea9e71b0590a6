//! What is wrong with a file that does not open, said of a tensor: candle's error for a truncated file names none.

use safetensors::tensor::TensorInfo;
use serde_json::{Map, Value};
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The first fault of a safetensors file; `None` if it looks sound from here.
pub(super) fn find(path: &Path) -> Option<String> {
    match read_header(path) {
        Ok(Ok((header, data_len))) => find_in_header(header, data_len),
        Ok(Err(fault)) => Some(fault),
        Err(error) => Some(error.to_string()),
    }
}

type Header = Map<String, Value>;

/// The header, and how many bytes of data follow it.
fn read_header(path: &Path) -> io::Result<Result<(Header, u64), String>> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    let mut prefix = [0; 8];
    if len < 8 {
        return Ok(Err(format!("truncated, has {len} bytes in all")));
    }
    file.read_exact(&mut prefix)?;
    let header_len = u64::from_le_bytes(prefix);
    // The format's own limit; without it, a file of another kind would be read as one huge header.
    if header_len > 100_000_000 {
        return Ok(Err(format!(
            "no safetensors file, its header should have {header_len} bytes"
        )));
    }
    if header_len > len - 8 {
        return Ok(Err(format!(
            "truncated, its header should have {header_len} bytes, has {}",
            len - 8
        )));
    }
    let mut header = Vec::new();
    file.take(header_len).read_to_end(&mut header)?;
    Ok(match serde_json::from_slice(&header) {
        Ok(header) => Ok((header, len - 8 - header_len)),
        Err(error) => Err(format!("its header is not JSON: {error}")),
    })
}

fn find_in_header(mut header: Header, data_len: u64) -> Option<String> {
    header.remove("__metadata__");
    let mut tensors = Vec::new();
    for (name, info) in header {
        match serde_json::from_value::<TensorInfo>(info) {
            Ok(info) => tensors.push((name, info)),
            Err(error) => return Some(format!("{name}: {error}")),
        }
    }
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut at = 0;
    for (name, info) in tensors {
        let (start, end) = info.data_offsets;
        if start != at {
            return Some(format!("{name}: starts at byte {start}, want {at}"));
        }
        if Some(end) != byte_len(&info).and_then(|len| start.checked_add(len)) {
            return Some(format!(
                "{name}: {:?} {:?} does not fill bytes {start} to {end}",
                info.dtype, info.shape
            ));
        }
        if end as u64 > data_len {
            return Some(format!(
                "truncated, {name} ends at byte {end}, the data at {data_len}"
            ));
        }
        at = end;
    }
    match data_len - at as u64 {
        0 => None,
        rest => Some(format!("{rest} bytes follow the last tensor")),
    }
}

fn byte_len(info: &TensorInfo) -> Option<usize> {
    let multiply = |bits: usize, dim: &usize| bits.checked_mul(*dim);
    let bits = info.shape.iter().try_fold(info.dtype.bitsize(), multiply)?;
    (bits % 8 == 0).then_some(bits / 8)
}
