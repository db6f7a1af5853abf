//! The rules and what they share: how to read a source file.

pub mod floors;
pub mod imports;
pub mod lua;
pub mod names;
pub mod shape;

/// A text file.
#[derive(Clone, Debug)]
pub struct File {
    /// Relative to the root, with `/`.
    pub path: String,
    pub text: String,
}

impl File {
    /// For samples.
    #[cfg(test)]
    pub fn sample(path: &str, text: &str) -> File {
        File { path: path.to_owned(), text: text.to_owned() }
    }

    /// Is it a source of the gateway?
    pub fn in_src(&self) -> bool {
        self.path.starts_with("src/") && self.is_rust()
    }

    pub fn is_rust(&self) -> bool {
        has_extension(&self.path, "rs")
    }

    /// Does it hold nothing but tests?
    pub fn is_test(&self) -> bool {
        let inside = |directory: &str| self.path.split('/').any(|part| part == directory);
        self.path.ends_with("/tests.rs") || inside("tests")
    }

    /// The path inside `src`, such as `fleet/build.rs`.
    pub fn in_crate(&self) -> &str {
        self.path.strip_prefix("src/").unwrap_or(&self.path)
    }

    /// Is it the module `module` or inside of it? `fleet/build` stands for `fleet/build.rs` and `fleet/build/…`.
    pub fn belongs_to(&self, module: &str) -> bool {
        let rest = self.in_crate().strip_prefix(module);
        rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
    }

    /// The lines that are compiled into the program, numbered from 1: neither comments nor the tests at the end of
    /// the file.
    pub fn code(&self) -> Vec<(usize, &str)> {
        if self.is_test() {
            return Vec::new();
        }
        let mut lines = Vec::new();
        let mut all = self.text.lines().enumerate().peekable();
        while let Some((index, line)) = all.next() {
            let next = all.peek().map_or("", |(_, next)| next.trim_start());
            if line.trim() == "#[cfg(test)]" && next.starts_with("mod ") {
                if next.ends_with(';') {
                    all.next();
                    continue;
                }
                // By convention the tests end the file.
                break;
            }
            lines.push((index + 1, without_comment(line)));
        }
        lines
    }
}

/// `path:line: complaint`.
pub fn at(file: &File, line: usize, complaint: &str) -> String {
    format!("{}:{line}: {complaint}", file.path)
}

pub fn has_extension(path: &str, extension: &str) -> bool {
    path.rsplit_once('.').is_some_and(|(_, found)| found == extension)
}

/// The line up to `//`, unless that stands in a string (as far as one line can tell).
fn without_comment(line: &str) -> &str {
    let mut from = 0;
    while let Some(found) = line[from..].find("//") {
        let at = from + found;
        let quotes = line[..at].matches('"').count() - line[..at].matches("\\\"").count();
        if quotes.is_multiple_of(2) {
            return &line[..at];
        }
        from = at + 2;
    }
    line
}

/// The line with its string literals emptied (as far as one line can tell).
pub fn without_strings(line: &str) -> String {
    let mut kept = String::new();
    let mut inside = false;
    let mut escaped = false;
    for character in line.chars() {
        if !inside || (character == '"' && !escaped) {
            kept.push(character);
        }
        if character == '"' && !escaped && !kept.ends_with("'\"") {
            inside = !inside;
        }
        escaped = inside && character == '\\' && !escaped;
    }
    kept
}

/// Does `text` use the library path `path` (`tokio`, `tokio::spawn`)? Not a longer name that contains it, and not a
/// module or a field of ours with that name (`crate::discovery::kube`).
pub fn mentions(text: &str, path: &str) -> bool {
    words(text, path).any(|start| !text[..start].ends_with([':', '.']))
}

/// Does `text` hold `word` as a whole, whatever path stands before it?
pub fn has_word(text: &str, word: &str) -> bool {
    words(text, word).next().is_some()
}

fn words<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let inside = |character: char| character.is_alphanumeric() || character == '_';
    text.match_indices(word)
        .map(|(start, _)| start)
        .filter(move |start| !text[..*start].ends_with(inside) && !text[start + word.len()..].starts_with(inside))
}

#[test]
fn code_is_told_from_comments_and_tests() {
    let file =
        File::sample("src/a.rs", "//! tokio\nlet u = \"http://x\"; // tokio\n#[cfg(test)]\nmod tests {\n tokio\n}\n");
    assert_eq!(file.code(), [(1, ""), (2, "let u = \"http://x\"; ")]);
    let file = File::sample("src/a.rs", "a\n#[cfg(test)]\nmod tests;\nb\n");
    assert_eq!(file.code(), [(1, "a"), (4, "b")]);
    assert!(File::sample("src/a/tests.rs", "tokio").code().is_empty());
}

#[test]
fn paths_are_matched_whole() {
    for (text, expected) in [
        ("use tokio::time;", true),
        ("tokio", true),
        ("use tokio_util::sync;", false),
        ("crate::tokio", false),
        ("self.tokio()", false),
        ("(tokio::spawn)", true),
    ] {
        assert_eq!(mentions(text, "tokio"), expected, "{text}");
    }
}

#[test]
fn strings_are_emptied() {
    for (line, expected) in
        [("a(\"kube\", b)", "a(\"\", b)"), ("\"x\\\"y\" z", "\"\" z"), ("'\"' kube", "'\"' kube"), ("plain", "plain")]
    {
        assert_eq!(without_strings(line), expected, "{line}");
    }
}

#[test]
fn modules_are_files_and_folders() {
    let belongs = |path: &str, module: &str| File::sample(path, "").belongs_to(module);
    assert!(belongs("src/fleet/build.rs", "fleet/build") && belongs("src/fleet/build/merge.rs", "fleet/build"));
    assert!(belongs("src/app.rs", "app") && !belongs("src/apple.rs", "app"));
}
