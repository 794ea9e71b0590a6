//! Kernel parameters: only their attributes are read, their types are left to C++.

use std::collections::HashSet;

use super::token::{attribute_number, split_commas, text, words, Kind, Token};
use super::Argument;

const POSITIONS: &[(&str, &str)] = &[
    ("thread_position_in_grid", "MSL_ARG_THREAD_POSITION_IN_GRID"),
    (
        "thread_position_in_threadgroup",
        "MSL_ARG_THREAD_POSITION_IN_THREADGROUP",
    ),
    (
        "threadgroup_position_in_grid",
        "MSL_ARG_THREADGROUP_POSITION_IN_GRID",
    ),
    (
        "dispatch_threads_per_threadgroup",
        "MSL_ARG_THREADS_PER_THREADGROUP",
    ),
    ("threads_per_threadgroup", "MSL_ARG_THREADS_PER_THREADGROUP"),
    ("threadgroups_per_grid", "MSL_ARG_THREADGROUPS_PER_GRID"),
    ("threads_per_grid", "MSL_ARG_THREADS_PER_GRID"),
    (
        "thread_index_in_threadgroup",
        "MSL_ARG_THREAD_INDEX_IN_THREADGROUP",
    ),
    (
        "simdgroup_index_in_threadgroup",
        "MSL_ARG_SIMDGROUP_INDEX_IN_THREADGROUP",
    ),
    (
        "thread_index_in_simdgroup",
        "MSL_ARG_THREAD_INDEX_IN_SIMDGROUP",
    ),
    (
        "simdgroups_per_threadgroup",
        "MSL_ARG_SIMDGROUPS_PER_THREADGROUP",
    ),
    ("threads_per_simdgroup", "MSL_ARG_THREADS_PER_SIMDGROUP"),
    ("thread_execution_width", "MSL_ARG_THREADS_PER_SIMDGROUP"),
];

pub fn arguments(parameters: &[Token]) -> Result<Vec<Argument>, String> {
    let parameters = split_commas(parameters);
    let mut taken: HashSet<u32> = parameters
        .iter()
        .filter_map(|p| attribute_number(&attributes(p), "buffer"))
        .collect();
    parameters
        .iter()
        .map(|parameter| argument(parameter, &mut taken))
        .collect()
}

fn argument(parameter: &[Token], taken: &mut HashSet<u32>) -> Result<Argument, String> {
    let attributes = attributes(parameter);
    let in_constant_space = parameter.iter().any(|t| t.is_word("constant"));
    let buffer = match in_constant_space {
        true => "MSL_ARG_CONSTANT",
        false => "MSL_ARG_BUFFER",
    };
    if let Some(index) = attribute_number(&attributes, "buffer") {
        if index > 30 {
            return Err(format!("buffer({index}): Metal has the indices 0 to 30"));
        }
        return Ok(Argument {
            kind: buffer,
            index,
        });
    }
    if let Some(index) = attribute_number(&attributes, "threadgroup") {
        return Ok(Argument {
            kind: "MSL_ARG_THREADGROUP",
            index,
        });
    }
    let position = POSITIONS
        .iter()
        .find(|(name, _)| words(&attributes).any(|w| w == *name));
    if let Some((_, kind)) = position {
        return Ok(Argument { kind, index: 0 });
    }
    if parameter.iter().any(|t| t.is_punct("*") || t.is_punct("&")) {
        // Without a number: the next free index, as Metal assigns them.
        let index = (0..).find(|i| !taken.contains(i)).unwrap_or_default();
        taken.insert(index);
        return Ok(Argument {
            kind: buffer,
            index,
        });
    }
    Err(format!("parameter not understood: {}", text(parameter)))
}

fn attributes(parameter: &[Token]) -> String {
    parameter
        .iter()
        .filter(|t| t.kind == Kind::Attribute)
        .map(|t| t.text.as_str())
        .collect()
}
