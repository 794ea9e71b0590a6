//! The declarations of a translation unit: finds kernels, their instantiations and function constants, and drops what
//! C++ would take for a second definition of the same thing.

use std::collections::HashSet;

use super::token::{attribute_number, closing, skip_blank, text, Kind, Token};
use super::{emit, kernel, Entry, Unit};

/// The braces of a declaration, and whether they hold declarations (a namespace, a class) or statements.
struct Body {
    open: usize,
    close: usize,
    is_scope: bool,
}

/// Walks the declarations between `from` and `to`.
pub fn scope(
    tokens: &mut [Token],
    from: usize,
    to: usize,
    in_class: bool,
    unit: &mut Unit,
) -> Result<(), String> {
    let mut seen = HashSet::new();
    let mut at = skip_blank(tokens, from);
    while at < to {
        let access_label = ["public", "private", "protected"]
            .iter()
            .any(|label| tokens[at].is_word(label));
        if tokens[at].is_punct(";") {
            at += 1;
        } else if in_class && access_label {
            at = skip_blank(tokens, at + 1) + 1;
        } else {
            let (end, body) = extent(tokens, at, to);
            declaration(tokens, at, end, body, in_class, &mut seen, unit)?;
            at = end;
        }
        at = skip_blank(tokens, at);
    }
    Ok(())
}

/// Where the declaration at `start` ends: after its `;` or after its body.
fn extent(tokens: &[Token], start: usize, to: usize) -> (usize, Option<Body>) {
    let (mut at, mut body) = (start, None);
    let (mut initialiser, mut is_operator) = (false, false);
    while at < to {
        let token = &tokens[at];
        if token.is_word("template") {
            let open = skip_blank(tokens, at + 1);
            if open < to && tokens[open].is_punct("<") {
                at = closing(tokens, open) + 1;
                continue;
            }
        }
        is_operator |= token.is_word("operator");
        if token.kind == Kind::Punct {
            match token.text.as_str() {
                "(" | "[" => at = closing(tokens, at),
                "=" => initialiser = !is_operator,
                ";" => return (at + 1, body),
                "{" => {
                    let close = closing(tokens, at);
                    let head = &tokens[start..at];
                    let is_scope = opens_scope(head);
                    if !initialiser && (is_scope || !initialises_member(head)) {
                        let found = Body {
                            open: at,
                            close,
                            is_scope,
                        };
                        let next = skip_blank(tokens, close + 1);
                        let is_namespace = head.iter().any(|t| t.is_word("namespace"));
                        let declares_more =
                            is_scope && !is_namespace && next < to && !tokens[next].is_punct(";");
                        body = Some(found);
                        if !declares_more {
                            return (close + 1, body);
                        }
                    }
                    at = close;
                }
                _ => {}
            }
        }
        at += 1;
    }
    (to, body)
}

/// `struct X {` opens a scope, `struct X f() {` does not.
fn opens_scope(head: &[Token]) -> bool {
    let keyword = head.iter().any(|t| {
        let keywords = ["struct", "class", "union", "namespace", "enum"];
        t.kind == Kind::Word && keywords.contains(&t.text.as_str())
    });
    let last = head
        .iter()
        .rev()
        .find(|t| !t.is_blank() && t.kind != Kind::Attribute);
    keyword && !last.is_some_and(|t| t.is_punct(")") || t.is_word("const"))
}

/// The brace after `X() : member` belongs to the member.
fn initialises_member(head: &[Token]) -> bool {
    let (mut depth, mut parameters_closed, mut list) = (0, false, false);
    for token in head.iter().filter(|t| t.kind == Kind::Punct) {
        match token.text.as_str() {
            "(" => depth += 1,
            ")" => {
                depth -= 1;
                parameters_closed = depth == 0;
            }
            ":" if parameters_closed && depth == 0 => list = true,
            _ => {}
        }
    }
    let last = head.iter().rev().find(|t| !t.is_blank());
    list && last.is_some_and(|t| t.kind == Kind::Word || t.is_punct(">"))
}

fn declaration(
    tokens: &mut [Token],
    start: usize,
    end: usize,
    body: Option<Body>,
    in_class: bool,
    seen: &mut HashSet<String>,
    unit: &mut Unit,
) -> Result<(), String> {
    // Places of the tokens that mean something.
    let places: Vec<usize> = (start..end).filter(|&i| !tokens[i].is_blank()).collect();
    let Some(&first) = places.first() else {
        return Ok(());
    };
    if !in_class {
        let handled = instantiation(tokens, start, end, &places, unit)?
            || function_constant(tokens, &places, &body, unit)?
            || derived_constant(tokens, end, &places, &body, unit)
            || alias_of_left_out(tokens, &places, unit);
        if handled {
            return Ok(());
        }
    }
    if let Some(Body {
        open,
        is_scope: false,
        ..
    }) = body
    {
        if !in_class && kernel_function(tokens, first, open, &places, unit)? {
            tokens[start..end].iter_mut().for_each(Token::erase);
            return Ok(());
        }
    }
    // Overloads on the address space alone are one function here: the first stays.
    let has_space = places.iter().any(|&i| tokens[i].is_address_space());
    let key = places
        .iter()
        .map(|&i| &tokens[i])
        .filter(|t| !t.is_address_space() && t.kind != Kind::Attribute)
        .map(|t| t.text.as_str())
        .collect::<Vec<_>>()
        .join(" ");
    if !seen.insert(key) && has_space {
        tokens[start..end].iter_mut().for_each(Token::erase);
        return Ok(());
    }
    if let Some(Body {
        open,
        close,
        is_scope: true,
    }) = body
    {
        let has = |word: &str| tokens[start..open].iter().any(|t| t.is_word(word));
        if !has("enum") {
            let is_class = !has("namespace");
            scope(tokens, open + 1, close, is_class, unit)?;
        }
    }
    Ok(())
}

/// `template [[host_name("n")]] kernel void f<T>(...);`, also in its `decltype` spellings.
fn instantiation(
    tokens: &mut [Token],
    start: usize,
    end: usize,
    places: &[usize],
    unit: &mut Unit,
) -> Result<bool, String> {
    if !tokens[places[0]].is_word("template") {
        return Ok(false);
    }
    let Some(&attribute) = places.iter().find(|&&i| tokens[i].names("host_name")) else {
        return Ok(false);
    };
    // Adjacent literals, as a macro leaves them, are one.
    let quoted: Vec<&str> = tokens[attribute].text.split('"').collect();
    let name: String = quoted.iter().skip(1).step_by(2).copied().collect();
    let mut at = attribute + 1;
    while at < end {
        let open = skip_blank(tokens, at + 1);
        if tokens[at].is_word("decltype") {
            at = closing(tokens, open);
        } else if tokens[at].kind == Kind::Word && open < end && tokens[open].is_punct("<") {
            let close = closing(tokens, open);
            let next = skip_blank(tokens, close + 1);
            if next < end && (tokens[next].is_punct("(") || tokens[next].is_punct(";")) {
                unit.entries.push(Entry {
                    name,
                    expression: text(&tokens[at..=close]),
                    function: tokens[at].text.clone(),
                });
                tokens[start..end].iter_mut().for_each(Token::erase);
                return Ok(true);
            }
            at = close;
        }
        at += 1;
    }
    Err(format!(
        "instantiation not understood: {}",
        text(&tokens[start..end])
    ))
}

/// `constant T name [[function_constant(n)]];` becomes a variable that the dispatch sets.
fn function_constant(
    tokens: &mut [Token],
    places: &[usize],
    body: &Option<Body>,
    unit: &mut Unit,
) -> Result<bool, String> {
    let Some(&attribute) = places
        .iter()
        .find(|&&i| tokens[i].names("function_constant"))
    else {
        return Ok(false);
    };
    if body.is_some() || places.iter().any(|&i| tokens[i].is_punct("(")) {
        return Ok(false);
    }
    let index = attribute_number(&tokens[attribute].text, "function_constant");
    let name = places
        .iter()
        .rev()
        .find(|&&i| i < attribute && tokens[i].kind == Kind::Word);
    let (Some(index), Some(&name)) = (index, name) else {
        let declaration: Vec<Token> = places.iter().map(|&i| tokens[i].clone()).collect();
        return Err(format!(
            "function constant not understood: {}",
            text(&declaration)
        ));
    };
    unit.constants.push((tokens[name].text.clone(), index));
    make_variable(tokens, places);
    Ok(true)
}

/// `constant T name = ...;` of a function constant: computed again before each dispatch.
fn derived_constant(
    tokens: &mut [Token],
    end: usize,
    places: &[usize],
    body: &Option<Body>,
    unit: &mut Unit,
) -> bool {
    let Some(equals) = places.iter().position(|&i| tokens[i].is_punct("=")) else {
        return false;
    };
    let known = |t: &Token| {
        t.kind == Kind::Word
            && (t.text == "is_function_constant_defined"
                || unit.constants.iter().any(|(name, _)| *name == t.text)
                || unit.derived.iter().any(|(name, _)| *name == t.text))
    };
    let (left, right) = places.split_at(equals);
    let depends = right.iter().any(|&i| known(&tokens[i]));
    let is_constant = left.iter().any(|&i| tokens[i].is_word("constant"));
    let (Some(&name), true, true, None) = (left.last(), depends, is_constant, body) else {
        return false;
    };
    let name = tokens[name].text.clone();
    let expression = emit::spell_defined(&text(&tokens[right[0] + 1..end - 1]));
    tokens[right[0]..end - 1].iter_mut().for_each(Token::erase);
    make_variable(tokens, left);
    unit.derived.push((name, expression));
    true
}

fn make_variable(tokens: &mut [Token], places: &[usize]) {
    for &i in places {
        let specifiers = ["const", "constexpr", "static", "constant"];
        if specifiers.iter().any(|s| tokens[i].is_word(s)) {
            tokens[i].erase();
        }
    }
}

/// `typedef decltype(kernel<...>) name;`, when the kernel is left out.
fn alias_of_left_out(tokens: &mut [Token], places: &[usize], unit: &Unit) -> bool {
    let is_alias = places.len() > 4
        && tokens[places[0]].is_word("typedef")
        && tokens[places[1]].is_word("decltype")
        && unit.left_out.contains(&tokens[places[3]].text);
    if is_alias {
        places.iter().for_each(|&i| tokens[i].erase());
    }
    is_alias
}

/// Notes a kernel; true when it is not wanted.
fn kernel_function(
    tokens: &[Token],
    first: usize,
    body: usize,
    places: &[usize],
    unit: &mut Unit,
) -> Result<bool, String> {
    let mark = places
        .iter()
        .find(|&&i| i < body && (tokens[i].is_word("kernel") || tokens[i].names("kernel")));
    let Some(&mark) = mark else {
        return Ok(false);
    };
    let open = (mark..body).find(|&i| tokens[i].is_punct("("));
    let open = open.ok_or("a kernel without parameters")?;
    let name = (mark..open).rev().find(|&i| tokens[i].kind == Kind::Word);
    let name = tokens[name.ok_or("a kernel without a name")?].text.clone();
    let parameters = &tokens[open + 1..closing(tokens, open)];
    let arguments = kernel::arguments(parameters).map_err(|e| format!("{name}: {e}"))?;
    if !tokens[first].is_word("template") {
        unit.entries.push(Entry {
            name: name.clone(),
            expression: name.clone(),
            function: name.clone(),
        });
    }
    if !unit.keep.is_empty() && !unit.keep.contains(&name) {
        unit.left_out.insert(name);
        return Ok(true);
    }
    unit.kernels.insert(name, arguments);
    Ok(false)
}
