//! The same text for clang's C++ for OpenCL, which has MSL's address spaces: they stay, under its names, and a
//! pointer of the wrong space is a compile error there.

use std::collections::HashSet;

use super::token::{skip_blank, Kind, Token};
use super::{prepare, threadgroup, translate_only};

const SCALARS: [&str; 12] = [
    "bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "float", "half",
    "bfloat",
];

pub fn strict(preprocessed: &str) -> Result<String, String> {
    let entries = translate_only(preprocessed, HashSet::new())?.entries;
    let mut tokens = prepare(preprocessed);
    for at in 0..tokens.len() {
        give_value_to_function_constant(&mut tokens, at);
        erase_instantiation(&mut tokens, at);
    }
    threadgroup::variables(&mut tokens, |name, kind, _| {
        format!("__local {kind} &{name} = *(__local {kind} *)0")
    })?;
    let mut code = String::from("#include \"declarations.h\"\n");
    for (at, token) in tokens.iter().enumerate() {
        let next = skip_blank(&tokens, at + 1);
        let called = next < tokens.len() && tokens[next].is_punct("(");
        match (token.kind, token.text.as_str()) {
            (Kind::Word, "device") => code.push_str("__global"),
            (Kind::Word, "constant") => code.push_str("__constant"),
            (Kind::Word, "threadgroup") => code.push_str("__local"),
            (Kind::Word, "thread") => code.push_str("__private"),
            (Kind::Word, "kernel") | (Kind::Attribute, _) => code.push(' '),
            // Ordinary names in Metal, keywords of OpenCL.
            (Kind::Word, word @ ("local" | "global" | "generic" | "pipe" | "event_t")) => {
                code.push_str(word);
                code.push('_');
            }
            // float4(a, b, c, d)
            (Kind::Word, word) if called && is_vector(word) => {
                code.push_str(&format!("MSL_MAKE({word})"));
            }
            (_, text) => code.push_str(text),
        }
    }
    code.push_str("\n#line 1 \"instantiations\"\n");
    for entry in entries.iter().filter(|e| e.expression.contains('<')) {
        let expression = &entry.expression;
        code.push_str(&format!("template decltype({expression}) {expression};\n"));
    }
    Ok(code)
}

fn is_vector(word: &str) -> bool {
    let scalar = word.strip_suffix(['2', '3', '4']);
    scalar.is_some_and(|s| SCALARS.contains(&s))
}

/// A program-scope constant needs an initialiser in that language.
fn give_value_to_function_constant(tokens: &mut [Token], at: usize) {
    if !tokens[at].names("function_constant") {
        return;
    }
    let next = skip_blank(tokens, at + 1);
    let before = tokens[..at].iter().rev().find(|t| t.kind == Kind::Punct);
    let starts_statement = before.is_none_or(|t| t.is_punct(";") || t.is_punct("}"));
    if next < tokens.len() && tokens[next].is_punct(";") && starts_statement {
        tokens[at] = Token::new(Kind::Word, "= {}");
    }
}

fn erase_instantiation(tokens: &mut [Token], at: usize) {
    let next = skip_blank(tokens, at + 1);
    if !tokens[at].is_word("template") || next >= tokens.len() || !tokens[next].names("host_name") {
        return;
    }
    let end = (next..tokens.len()).find(|&i| tokens[i].is_punct(";"));
    let end = end.unwrap_or(tokens.len() - 1);
    tokens[at..=end].iter_mut().for_each(Token::erase);
}
