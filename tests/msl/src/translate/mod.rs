//! Metal Shading Language to C++17, token by token: what C++ does not know is taken out or spelt as a call into the
//! shim, the rest stays where it is. Every line keeps its number, so that reports and compiler errors name the line
//! of the `.metal` text.

mod declaration;
mod emit;
mod kernel;
mod strict;
mod threadgroup;
mod token;

use std::collections::{HashMap, HashSet};

pub use emit::emit;
pub use strict::strict;
use token::{closing, single_precision, skip_blank, text, tokenize, Kind, Token};

/// This module, for the digest of what it made.
pub const SOURCE: &str = concat!(
    include_str!("declaration.rs"),
    include_str!("emit.rs"),
    include_str!("kernel.rs"),
    include_str!("mod.rs"),
    include_str!("threadgroup.rs"),
    include_str!("token.rs"),
);

/// What the runtime passes for one kernel parameter: a kind of shim/abi.h and an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Argument {
    pub kind: &'static str,
    pub index: u32,
}

/// A name that a dispatch can ask for.
#[derive(Clone, Debug)]
pub struct Entry {
    pub name: String,
    /// `kernel` or `kernel<arguments>`
    pub expression: String,
    pub function: String,
}

/// A translated library.
#[derive(Debug, Default)]
pub struct Unit {
    pub code: String,
    /// Parameters of the kernel functions.
    pub kernels: HashMap<String, Vec<Argument>>,
    pub entries: Vec<Entry>,
    /// Function constants: name and index.
    pub constants: Vec<(String, u32)>,
    /// Program-scope variables computed from function constants: name and expression.
    pub derived: Vec<(String, String)>,
    /// Kernel functions to keep; empty: all.
    keep: HashSet<String>,
    left_out: HashSet<String>,
}

/// Translates preprocessed source. Only the kernels that `entries` need are kept, all when it is empty: a library of
/// templates takes minutes to compile whole.
pub fn translate(preprocessed: &str, entries: &[&str]) -> Result<Unit, String> {
    let all = translate_only(preprocessed, HashSet::new())?;
    if entries.is_empty() {
        return Ok(all);
    }
    let mut keep = HashSet::new();
    for wanted in entries {
        let entry = all.entries.iter().find(|e| e.name == *wanted);
        let entry = entry.ok_or_else(|| format!("no kernel {wanted} in the texts"))?;
        keep.insert(entry.function.clone());
    }
    let mut unit = translate_only(preprocessed, keep)?;
    unit.entries.retain(|e| entries.contains(&e.name.as_str()));
    Ok(unit)
}

fn translate_only(preprocessed: &str, keep: HashSet<String>) -> Result<Unit, String> {
    let mut tokens = prepare(preprocessed);
    let mut unit = Unit {
        keep,
        ..Unit::default()
    };
    let end = tokens.len();
    declaration::scope(&mut tokens, 0, end, false, &mut unit)?;
    threadgroup::variables(&mut tokens, |name, kind, id| {
        format!("{kind} &{name} = msl::threadgroup_variable<{kind}>({id}, \"{name}\")")
    })?;
    take_out_metal(&mut tokens);
    unit.code = tokens.iter().map(|t| t.text.as_str()).collect();
    Ok(unit)
}

fn prepare(preprocessed: &str) -> Vec<Token> {
    let mut tokens = tokenize(preprocessed);
    for token in &mut tokens {
        if token.kind == Kind::Number {
            if let Some(number) = single_precision(&token.text) {
                token.text = number;
            }
        }
        // Unrolling by hand only costs compile time here.
        if token.kind == Kind::Directive && token.text.starts_with("#pragma") {
            token.text.clear();
        }
    }
    tokens
}

/// Address spaces, `kernel`, attributes, `is_function_constant_defined`.
fn take_out_metal(tokens: &mut [Token]) {
    for at in 0..tokens.len() {
        if tokens[at].is_word("constant") && !const_beside(tokens, at) {
            tokens[at].text = "const".into();
        } else if tokens[at].is_address_space()
            || tokens[at].is_word("kernel")
            || tokens[at].kind == Kind::Attribute
        {
            tokens[at].erase();
        } else if tokens[at].is_word("is_function_constant_defined") {
            let open = skip_blank(tokens, at + 1);
            let close = closing(tokens, open);
            let name = text(&tokens[open + 1..close]);
            tokens[at + 1..=close].iter_mut().for_each(Token::erase);
            tokens[at].text = emit::is_defined(&name);
        }
    }
}

/// Whether `const` or `constexpr` stands in the same specifiers as the `constant` at `at`.
fn const_beside(tokens: &[Token], at: usize) -> bool {
    let is_const = |t: &Token| t.is_word("const") || t.is_word("constexpr");
    let inside = |t: &&Token| t.kind != Kind::Punct || matches!(t.text.as_str(), "::" | "<" | ">");
    let before = tokens[..at].iter().rev().take_while(inside);
    let after = tokens[at + 1..].iter().take_while(inside);
    before.chain(after).any(is_const)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_keeps_its_number() {
        let source = "kernel void k(device float *a [[buffer(0)]],\n  uint t [[thread_position_in_grid]]) {\n  threadgroup float s[4],\n    z[2];\n  s[t] = 1.0;\n  a[t] = s[t] + 2.5h;\n}\n";
        let unit = translate(source, &[]).unwrap();
        let line = |needle: &str| unit.code.lines().position(|l| l.contains(needle));
        assert_eq!(unit.code.lines().count(), source.lines().count());
        assert_eq!(line("s[t] = 1.0f"), Some(4));
        assert_eq!(line("((half)2.5f)"), Some(5));
    }

    #[test]
    fn an_unnumbered_buffer_takes_the_next_free_index() {
        let source = "kernel void k(device float *a, constant uint &n [[buffer(0)]], device float *b, threadgroup float *s [[threadgroup(1)]]) {}\n";
        let unit = translate(source, &[]).unwrap();
        let indices: Vec<u32> = unit.kernels["k"].iter().map(|a| a.index).collect();
        assert_eq!(indices, [1, 0, 2, 1]);
        assert_eq!(unit.kernels["k"][1].kind, "MSL_ARG_CONSTANT");
    }

    #[test]
    fn a_kernel_parameter_without_a_binding_is_refused() {
        let error = translate("kernel void k(uint t) {}\n", &[]).unwrap_err();
        assert!(
            error.contains("k: parameter not understood: uint t"),
            "{error}"
        );
    }

    #[test]
    fn an_unknown_entry_is_refused() {
        let error = translate("kernel void k() {}\n", &["other"]).unwrap_err();
        assert_eq!(error, "no kernel other in the texts");
    }
}
