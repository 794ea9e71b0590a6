//! What is wrong with a file, said of a tensor: candle's error for a truncated file names none, and of two tensors of one name
//! it takes the last.

use super::super::{file::LARGEST_HEADER, strict};
use safetensors::tensor::TensorInfo;
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, Visitor};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// Those of convolutions in the vision part have five; errors show them all.
const MOST_DIMS: usize = 8;

/// The first fault of a safetensors file; `None` if it looks sound from here.
pub(super) fn find(path: &Path) -> Option<String> {
    match read_header(path) {
        Ok(Ok((header, data_len))) => find_in_header(header, data_len),
        Ok(Err(fault)) => Some(fault),
        Err(error) => Some(error.to_string()),
    }
}

/// Tensors by name; `None` for the metadata, which has the place of one.
struct Header(BTreeMap<String, Option<TensorInfo>>);

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Entries;

        impl<'de> Visitor<'de> for Entries {
            type Value = Header;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, from: A) -> Result<Header, A::Error> {
                let entries = strict::fields(from, |name, from| match name {
                    "__metadata__" => from.next_value::<IgnoredAny>().map(|_| None),
                    _ => from
                        .next_value()
                        .map_err(|error| A::Error::custom(format!("{name}: {error}"))),
                });
                entries.map(Header)
            }
        }

        from.deserialize_map(Entries)
    }
}

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
    // Without a limit a file of another kind would be read as one huge header.
    if header_len > LARGEST_HEADER {
        return Ok(Err(format!(
            "no safetensors file, its header should have {header_len} bytes, want at most {LARGEST_HEADER}"
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
        Err(error) if error.is_data() => Err(error.to_string()),
        Err(error) => Err(format!("its header is not JSON: {error}")),
    })
}

fn find_in_header(Header(entries): Header, data_len: u64) -> Option<String> {
    let entries = entries.into_iter();
    let mut tensors: Vec<_> = entries
        .filter_map(|(name, info)| Some((name, info?)))
        .collect();
    tensors.sort_by_key(|(_, info)| info.data_offsets);
    let mut at = 0;
    for (name, info) in tensors {
        let (start, end) = info.data_offsets;
        if info.shape.len() > MOST_DIMS {
            return Some(format!(
                "{name}: has {} dimensions, want at most {MOST_DIMS}",
                info.shape.len()
            ));
        }
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
