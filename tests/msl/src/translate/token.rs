//! Tokens of preprocessed source, with its white space, so that every line keeps its number.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Word,
    Number,
    Quoted,
    Punct,
    /// `[[...]]`
    Attribute,
    Space,
    /// `# 12 "file"` and `#pragma`
    Directive,
}

#[derive(Clone, Debug)]
pub struct Token {
    pub kind: Kind,
    pub text: String,
}

impl Token {
    pub fn new(kind: Kind, text: &str) -> Token {
        Token {
            kind,
            text: text.to_string(),
        }
    }

    pub fn is_word(&self, word: &str) -> bool {
        self.kind == Kind::Word && self.text == word
    }

    pub fn is_punct(&self, punct: &str) -> bool {
        self.kind == Kind::Punct && self.text == punct
    }

    pub fn is_address_space(&self) -> bool {
        self.kind == Kind::Word
            && matches!(
                self.text.as_str(),
                "device" | "constant" | "threadgroup" | "thread"
            )
    }

    pub fn is_blank(&self) -> bool {
        matches!(self.kind, Kind::Space | Kind::Directive)
    }

    /// Whether an attribute has this name, or a name in this list.
    pub fn names(&self, attribute: &str) -> bool {
        self.kind == Kind::Attribute && words(&self.text).any(|w| w == attribute)
    }

    /// Leaves only the line breaks.
    pub fn erase(&mut self) {
        self.kind = Kind::Space;
        self.text.retain(|c| c == '\n');
        if self.text.is_empty() {
            self.text.push(' ');
        }
    }
}

pub fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
}

/// `n` of `name(n)` in an attribute.
pub fn attribute_number(attribute: &str, name: &str) -> Option<u32> {
    let at = attribute.find(&format!("{name}("))?;
    let rest = &attribute[at + name.len() + 1..];
    rest[..rest.find(')')?].trim().parse().ok()
}

pub fn tokenize(source: &str) -> Vec<Token> {
    let bytes = source.as_bytes();
    let mut tokens = Vec::new();
    let (mut at, mut line_start) = (0, true);
    while at < bytes.len() {
        let start = at;
        let kind = kind_at(bytes, at, line_start);
        at = end_of(kind, bytes, at);
        let text = &source[start..at];
        line_start = match kind {
            Kind::Space => line_start || text.contains('\n'),
            _ => false,
        };
        tokens.push(Token::new(kind, text));
    }
    tokens
}

fn kind_at(bytes: &[u8], at: usize, line_start: bool) -> Kind {
    let next = bytes.get(at + 1).copied().unwrap_or(0);
    match bytes[at] {
        b'#' if line_start => Kind::Directive,
        c if c.is_ascii_whitespace() => Kind::Space,
        c if c.is_ascii_alphabetic() || c == b'_' => Kind::Word,
        c if c.is_ascii_digit() || (c == b'.' && next.is_ascii_digit()) => Kind::Number,
        b'"' | b'\'' => Kind::Quoted,
        b'[' if next == b'[' => Kind::Attribute,
        _ => Kind::Punct,
    }
}

fn end_of(kind: Kind, bytes: &[u8], start: usize) -> usize {
    let run = |more: &dyn Fn(u8) -> bool| {
        let rest = &bytes[start..];
        start + rest.iter().position(|&c| !more(c)).unwrap_or(rest.len())
    };
    match kind {
        Kind::Directive => run(&|c| c != b'\n'),
        Kind::Space => run(&|c| c.is_ascii_whitespace()),
        Kind::Word => run(&|c| c.is_ascii_alphanumeric() || c == b'_'),
        Kind::Number => end_of_number(bytes, start),
        Kind::Quoted => end_of_quoted(bytes, start),
        Kind::Attribute => end_of_attribute(bytes, start),
        Kind::Punct => {
            let two = bytes.get(start..start + 2);
            start + 1 + usize::from(two == Some(b"::") || two == Some(b"->"))
        }
    }
    .min(bytes.len())
}

fn end_of_number(bytes: &[u8], start: usize) -> usize {
    let hex = bytes[start..].starts_with(b"0x");
    let mut at = start + 1;
    while at < bytes.len() {
        let exponent = match bytes[at - 1] {
            b'p' | b'P' => true,
            b'e' | b'E' => !hex,
            _ => false,
        };
        let sign = matches!(bytes[at], b'+' | b'-') && exponent;
        if !(bytes[at].is_ascii_alphanumeric() || matches!(bytes[at], b'.' | b'_') || sign) {
            break;
        }
        at += 1;
    }
    at
}

fn end_of_quoted(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != bytes[start] {
        at += 1 + usize::from(bytes[at] == b'\\');
    }
    at + 1
}

fn end_of_attribute(bytes: &[u8], start: usize) -> usize {
    let (mut at, mut depth) = (start, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'[' | b'(' => depth += 1,
            b']' | b')' => depth -= 1,
            _ => {}
        }
        at += 1;
        if depth == 0 {
            break;
        }
    }
    at
}

/// The first token from `at` that is not white space.
pub fn skip_blank(tokens: &[Token], mut at: usize) -> usize {
    while at < tokens.len() && tokens[at].is_blank() {
        at += 1;
    }
    at
}

/// The bracket that closes the one at `open`; the last token where none does.
pub fn closing(tokens: &[Token], open: usize) -> usize {
    let opens = tokens[open].text.as_str();
    let closes = match opens {
        "(" => ")",
        "{" => "}",
        "[" => "]",
        _ => ">",
    };
    let (mut depth, mut at) = (0, open);
    while at < tokens.len() {
        if tokens[at].is_punct(opens) {
            depth += 1;
        } else if tokens[at].is_punct(closes) {
            depth -= 1;
            if depth == 0 {
                return at;
            }
        } else if opens == "<" && tokens[at].is_punct("(") {
            at = closing(tokens, at); // a comparison in a template argument
        }
        at += 1;
    }
    tokens.len() - 1
}

/// Splits at the commas outside brackets of any kind.
pub fn split_commas(tokens: &[Token]) -> Vec<&[Token]> {
    let mut parts = Vec::new();
    let (mut depth, mut start) = (0, 0);
    for (at, token) in tokens.iter().enumerate() {
        if token.kind != Kind::Punct {
            continue;
        }
        match token.text.as_str() {
            "(" | "[" | "{" | "<" => depth += 1,
            ")" | "]" | "}" | ">" => depth -= 1,
            "," if depth == 0 => {
                parts.push(&tokens[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if !parts.is_empty() || !text(tokens).is_empty() {
        parts.push(&tokens[start..]);
    }
    parts
}

/// The code without attributes and address spaces, on one line.
pub fn text(tokens: &[Token]) -> String {
    let mut out = String::new();
    for token in tokens {
        match token.kind {
            Kind::Space if !out.ends_with(' ') => out.push(' '),
            Kind::Space | Kind::Directive | Kind::Attribute => {}
            _ if token.is_address_space() => {}
            _ => out.push_str(&token.text),
        }
    }
    out.trim().to_string()
}

/// MSL has no double: a literal without a suffix is a float. Also spells half and bfloat literals.
pub fn single_precision(number: &str) -> Option<String> {
    let lower = number.to_ascii_lowercase();
    let hex = lower.starts_with("0x");
    let floating = match hex {
        true => lower.contains('p'),
        false => lower.contains('.') || lower.contains('e'),
    };
    if !floating {
        return None;
    }
    if let Some(digits) = lower.strip_suffix("bf") {
        return Some(format!("((bfloat){digits}f)"));
    }
    if let Some(digits) = lower.strip_suffix('h') {
        return Some(format!("((half){digits}f)"));
    }
    (!lower.ends_with('f')).then(|| format!("{number}f"))
}
