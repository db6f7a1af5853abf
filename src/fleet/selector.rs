//! Kubernetes label selectors (request header `external-filter`): equality (`=`, `==`, `!=`), sets (`in`, `notin`),
//! existence (`key`, `!key`) and whole numbers (`>`, `<`), all of which must hold.
//!
//! The grammar is that of Kubernetes' `labels.Parse`, with its odd corners: a value may be empty (`key=`,
//! `key in (a,)`), `in` and `notin` may be keys and values too, blanks matter only between words. Text comes from
//! clients, so its length and what it may ask for are bounded.

use std::collections::BTreeMap;

/// Longest selector, bytes.
pub const MAX_SELECTOR_BYTES: usize = 4096;
/// Most requirements of one selector.
pub const MAX_SELECTOR_REQUIREMENTS: usize = 8;
/// Most values of one selector, over all its sets.
const MAX_VALUES: usize = 128;
/// Longest name part of a key, and longest value, characters.
const MAX_NAME: usize = 63;
/// Longest prefix part of a key, characters.
const MAX_PREFIX: usize = 253;

/// What a label must be.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Test {
    /// `=`, `==`, `in`: there, and one of these.
    In(Vec<String>),
    /// `!=`, `notin`: not there, or none of these.
    NotIn(Vec<String>),
    /// There.
    Exists,
    /// Not there.
    Absent,
    /// There, a whole number, and above this.
    Above(i64),
    /// There, a whole number, and below this.
    Below(i64),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    test: Test,
}

/// A parsed selector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selector {
    text: String,
    requirements: Vec<Requirement>,
}

/// Why a text is no selector.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SelectorError {
    /// A bound is exceeded.
    #[error("it is too long or asks for too much")]
    TooLarge,
    /// Something stands where it cannot; the text ends there if `found` is empty.
    #[error("expected {expected} at byte {at}")]
    Unexpected {
        /// What would have fitted.
        expected: &'static str,
        /// Where in the text, bytes from its start.
        at: usize,
    },
    /// A key that no label can have.
    #[error("at byte {at} is a key that no label can have")]
    Key {
        /// Where in the text.
        at: usize,
    },
    /// A value that no label can have.
    #[error("at byte {at} is a value that no label can have")]
    Value {
        /// Where in the text.
        at: usize,
    },
}

impl Selector {
    /// Reads a selector. One without requirements selects everything.
    pub fn parse(text: &str) -> Result<Selector, SelectorError> {
        if text.len() > MAX_SELECTOR_BYTES {
            return Err(SelectorError::TooLarge);
        }
        let mut parser = Parser { rest: text, length: text.len(), values: 0 };
        let mut requirements = Vec::new();
        if parser.peek() != Token::End {
            loop {
                if requirements.len() == MAX_SELECTOR_REQUIREMENTS {
                    return Err(SelectorError::TooLarge);
                }
                requirements.push(parser.requirement()?);
                let at = parser.at();
                match parser.next() {
                    Token::End => break,
                    Token::Symbol(",") => {}
                    _ => return Err(SelectorError::Unexpected { expected: "a comma or the end", at }),
                }
            }
        }
        Ok(Selector { text: text.trim().to_owned(), requirements })
    }

    /// True when it selects everything.
    pub fn is_empty(&self) -> bool {
        self.requirements.is_empty()
    }

    /// Whether these labels satisfy every requirement.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.requirements.iter().all(|requirement| {
            let value = labels.get(&requirement.key);
            let number = || value.and_then(|value| value.parse::<i64>().ok());
            match &requirement.test {
                Test::In(values) => value.is_some_and(|value| values.contains(value)),
                Test::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Test::Exists => value.is_some(),
                Test::Absent => value.is_none(),
                Test::Above(bound) => number().is_some_and(|number| number > *bound),
                Test::Below(bound) => number().is_some_and(|number| number < *bound),
            }
        })
    }
}

impl std::fmt::Display for Selector {
    /// As it was written: what is in it has been checked, so it is printable ASCII and blanks.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Token<'a> {
    Symbol(&'static str),
    Word(&'a str),
    End,
}

/// Longest first, so that `==` is not read as two.
const SYMBOLS: [&str; 8] = ["==", "!=", "=", "!", "(", ")", ",", ">"];
const BELOW: &str = "<";

struct Parser<'a> {
    rest: &'a str,
    length: usize,
    values: usize,
}

impl<'a> Parser<'a> {
    /// Where the next token begins.
    fn at(&self) -> usize {
        self.length - self.rest.trim_start_matches(blank).len()
    }

    fn split(&self) -> (Token<'a>, &'a str) {
        let rest = self.rest.trim_start_matches(blank);
        if rest.is_empty() {
            return (Token::End, rest);
        }
        for symbol in SYMBOLS.into_iter().chain([BELOW]) {
            if let Some(rest) = rest.strip_prefix(symbol) {
                return (Token::Symbol(symbol), rest);
            }
        }
        let end = rest.find(|c| blank(c) || "=!(),><".contains(c)).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        (Token::Word(word), rest)
    }

    fn peek(&self) -> Token<'a> {
        self.split().0
    }

    fn next(&mut self) -> Token<'a> {
        let (token, rest) = self.split();
        self.rest = rest;
        token
    }

    fn requirement(&mut self) -> Result<Requirement, SelectorError> {
        let absent = self.peek() == Token::Symbol("!");
        if absent {
            self.next();
        }
        let at = self.at();
        let Token::Word(key) = self.next() else {
            return Err(SelectorError::Unexpected { expected: "a label's key", at });
        };
        if !valid_key(key) {
            return Err(SelectorError::Key { at });
        }
        let key = key.to_owned();
        if absent {
            return Ok(Requirement { key, test: Test::Absent });
        }
        if matches!(self.peek(), Token::End | Token::Symbol(",")) {
            return Ok(Requirement { key, test: Test::Exists });
        }
        let at = self.at();
        let test = match self.next() {
            Token::Symbol("=" | "==") => Test::In(vec![self.single()?]),
            Token::Symbol("!=") => Test::NotIn(vec![self.single()?]),
            Token::Symbol(">") => Test::Above(self.number()?),
            Token::Symbol(BELOW) => Test::Below(self.number()?),
            Token::Word("in") => Test::In(self.set()?),
            Token::Word("notin") => Test::NotIn(self.set()?),
            _ => return Err(SelectorError::Unexpected { expected: "=, ==, !=, in, notin, > or <", at }),
        };
        Ok(Requirement { key, test })
    }

    /// The value after an operator, which may be missing.
    fn single(&mut self) -> Result<String, SelectorError> {
        match self.peek() {
            Token::End | Token::Symbol(",") => self.take(""),
            _ => {
                let at = self.at();
                match self.next() {
                    Token::Word(value) => self.check(value, at),
                    _ => Err(SelectorError::Unexpected { expected: "a value", at }),
                }
            }
        }
    }

    fn number(&mut self) -> Result<i64, SelectorError> {
        let at = self.at();
        let number = self.single()?.parse();
        number.map_err(|_| SelectorError::Unexpected { expected: "a whole number", at })
    }

    /// `(a, b, …)`; a value may be empty, but `()` holds none.
    fn set(&mut self) -> Result<Vec<String>, SelectorError> {
        let at = self.at();
        if self.next() != Token::Symbol("(") {
            return Err(SelectorError::Unexpected { expected: "(", at });
        }
        if self.peek() == Token::Symbol(")") {
            return Err(SelectorError::Unexpected { expected: "a value", at: self.at() });
        }
        let mut values = Vec::new();
        loop {
            let at = self.at();
            values.push(match self.peek() {
                Token::Word(value) => {
                    self.next();
                    self.check(value, at)?
                }
                _ => self.take("")?,
            });
            let at = self.at();
            match self.next() {
                Token::Symbol(")") => return Ok(values),
                Token::Symbol(",") => {}
                _ => return Err(SelectorError::Unexpected { expected: "a comma or )", at }),
            }
        }
    }

    fn check(&mut self, value: &str, at: usize) -> Result<String, SelectorError> {
        if valid_name(value) { self.take(value) } else { Err(SelectorError::Value { at }) }
    }

    fn take(&mut self, value: &str) -> Result<String, SelectorError> {
        self.values += 1;
        if self.values > MAX_VALUES { Err(SelectorError::TooLarge) } else { Ok(value.to_owned()) }
    }
}

fn blank(c: char) -> bool {
    matches!(c, ' ' | '\t' | '\r' | '\n')
}

/// `name` or `prefix/name`; the prefix is a DNS subdomain.
fn valid_key(key: &str) -> bool {
    match key.split_once('/') {
        None => valid_name(key),
        Some((prefix, name)) => {
            valid_name(name) && prefix.len() <= MAX_PREFIX && prefix.split('.').all(valid_dns_label)
        }
    }
}

/// Letters, digits, `-`, `_`, `.`; letters or digits at both ends; not empty.
fn valid_name(name: &str) -> bool {
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte.is_ascii_alphanumeric());
    name.len() <= MAX_NAME
        && ends(name.bytes().next())
        && ends(name.bytes().last())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

fn valid_dns_label(label: &str) -> bool {
    let ends = |byte: Option<u8>| byte.is_some_and(|byte| byte != b'-');
    ends(label.bytes().next())
        && ends(label.bytes().last())
        && label.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-')
}
