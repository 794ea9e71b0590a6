//! `threadgroup T name[n];` in a function: a reference into memory that all threads of a threadgroup share.

use super::token::{split_commas, text, Kind, Token};

/// Rewrites each declaration; `spell` gets its name, its type and a number of its own.
pub fn variables(
    tokens: &mut Vec<Token>,
    spell: impl Fn(&str, &str, usize) -> String,
) -> Result<(), String> {
    let source = std::mem::take(tokens);
    let (mut at, mut id, mut depth) = (0, 0, 0);
    let mut statement_start = true;
    while at < source.len() {
        let token = &source[at];
        match token.text.as_str() {
            "{" if token.kind == Kind::Punct => depth += 1,
            "}" if token.kind == Kind::Punct => depth -= 1,
            _ => {}
        }
        if statement_start && depth > 0 && token.kind == Kind::Word {
            if let Some(end) = declaration_end(&source, at) {
                let declaration = &source[at..end];
                let code = rewrite(declaration, &mut id, &spell)?;
                tokens.push(Token::new(Kind::Word, &code));
                tokens.push(Token::new(Kind::Space, &line_breaks(declaration)));
                statement_start = false;
                at = end;
                continue;
            }
        }
        if !token.is_blank() {
            statement_start =
                token.kind == Kind::Punct && matches!(token.text.as_str(), ";" | "{" | "}" | ":");
        }
        tokens.push(token.clone());
        at += 1;
    }
    Ok(())
}

/// The `;` of a declaration of threadgroup variables at `start`; none when the statement is something else, such
/// as a pointer to threadgroup memory.
fn declaration_end(tokens: &[Token], start: usize) -> Option<usize> {
    let (mut depth, mut threadgroup, mut aligned) = (0, false, false);
    for (at, token) in tokens.iter().enumerate().skip(start) {
        if token.kind == Kind::Word {
            match token.text.as_str() {
                "threadgroup" => threadgroup = true,
                "alignas" => aligned = true,
                "return" | "using" | "typedef" | "template" | "struct" => return None,
                _ => {}
            }
        }
        if token.kind != Kind::Punct {
            continue;
        }
        match token.text.as_str() {
            ";" if depth == 0 => return threadgroup.then_some(at),
            "(" if depth == 0 && !aligned => return None,
            "{" | "}" => return None,
            "*" | "&" | "=" | "->" if depth == 0 => return None,
            "(" | "[" => depth += 1,
            ")" | "]" => depth -= 1,
            _ => {}
        }
    }
    None
}

fn rewrite(
    declaration: &[Token],
    id: &mut usize,
    spell: &impl Fn(&str, &str, usize) -> String,
) -> Result<String, String> {
    let mut base = String::new();
    let mut statements = Vec::new();
    for (i, declarator) in split_commas(declaration).iter().enumerate() {
        let bracket = declarator.iter().position(|t| t.is_punct("["));
        let bracket = bracket.unwrap_or(declarator.len());
        let name = (0..bracket)
            .rev()
            .find(|&k| declarator[k].kind == Kind::Word);
        let name = name
            .ok_or_else(|| format!("threadgroup variable without a name: {}", text(declaration)))?;
        if i == 0 {
            let without_static: Vec<Token> = declarator[..name]
                .iter()
                .filter(|t| !t.is_word("static"))
                .cloned()
                .collect();
            base = text(&without_static);
        }
        // A name for the type, because a reference to an array has no simpler spelling.
        let kind = format!("msl_threadgroup_{id}");
        let dimensions = text(&declarator[name + 1..]);
        let variable = spell(&declarator[name].text, &kind, *id);
        statements.push(format!("typedef {base} {kind}{dimensions}; {variable}"));
        *id += 1;
    }
    Ok(statements.join("; "))
}

fn line_breaks(tokens: &[Token]) -> String {
    tokens
        .iter()
        .flat_map(|t| t.text.chars())
        .filter(|c| *c == '\n')
        .collect()
}
