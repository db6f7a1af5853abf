//! As much of PromQL as it takes to see which metrics and labels a query names. Whether it is PromQL at all, Prometheus
//! says (`prometheus`, and `promtool` for the rules).

/// One selector.
#[derive(Debug, PartialEq, Eq)]
pub struct Selector {
    pub metric: String,
    /// Labels that it matches on.
    pub labels: Vec<String>,
}

/// What a query names.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Expression {
    pub selectors: Vec<Selector>,
    /// Labels that it groups or joins by.
    pub grouping: Vec<String>,
}

const GROUPING: [&str; 6] = ["by", "without", "on", "ignoring", "group_left", "group_right"];
const WORDS: [&str; 9] = ["and", "or", "unless", "bool", "offset", "inf", "Inf", "nan", "NaN"];

struct Reader<'a> {
    rest: &'a str,
}

impl Expression {
    /// Reads a query; the error says what is odd about it.
    pub fn read(query: &str) -> Result<Expression, String> {
        let mut reader = Reader { rest: query };
        let mut found = Expression::default();
        while let Some(next) = reader.rest.chars().next() {
            if next.is_ascii_alphabetic() || next == '_' || next == ':' {
                let word = reader.word();
                reader.space();
                if GROUPING.contains(&word) {
                    found.grouping.extend(reader.list());
                } else if !WORDS.contains(&word) && !reader.rest.starts_with('(') {
                    let labels = if reader.rest.starts_with('{') { reader.matchers()? } else { Vec::new() };
                    found.selectors.push(Selector { metric: word.to_owned(), labels });
                }
            } else if next.is_ascii_digit() {
                reader.skip_while(|c| c.is_ascii_alphanumeric() || c == '.');
            } else if next == '"' || next == '\'' {
                reader.string()?;
            } else if next == '[' {
                let (_, after) = reader.rest.split_once(']').ok_or("a range without end")?;
                reader.rest = after;
            } else if next == '{' {
                return Err("a selector without a name".to_owned());
            } else if next == '$' {
                return Err("a variable outside of a string or a range".to_owned());
            } else {
                reader.rest = &reader.rest[next.len_utf8()..];
            }
        }
        Ok(found)
    }
}

impl<'a> Reader<'a> {
    fn skip_while(&mut self, what: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !what(c)).unwrap_or(self.rest.len());
        let (skipped, rest) = self.rest.split_at(end);
        self.rest = rest;
        skipped
    }

    fn word(&mut self) -> &'a str {
        self.skip_while(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':')
    }

    fn space(&mut self) {
        self.skip_while(char::is_whitespace);
    }

    /// `(a, b)`, if it is there.
    fn list(&mut self) -> Vec<String> {
        let Some((list, after)) = self.rest.strip_prefix('(').and_then(|rest| rest.split_once(')')) else {
            return Vec::new();
        };
        self.rest = after;
        list.split(',').map(str::trim).filter(|label| !label.is_empty()).map(str::to_owned).collect()
    }

    fn string(&mut self) -> Result<(), String> {
        let mut chars = self.rest.char_indices();
        let quote = chars.next().map(|(_, c)| c);
        while let Some((at, c)) = chars.next() {
            if c == '\\' {
                chars.next();
            } else if Some(c) == quote {
                self.rest = &self.rest[at + 1..];
                return Ok(());
            }
        }
        Err("a string without end".to_owned())
    }

    fn matchers(&mut self) -> Result<Vec<String>, String> {
        self.rest = &self.rest[1..];
        let mut labels = Vec::new();
        loop {
            self.skip_while(|c| c.is_whitespace() || c == ',');
            if let Some(after) = self.rest.strip_prefix('}') {
                self.rest = after;
                return Ok(labels);
            }
            let label = self.word();
            self.space();
            let operator = self.skip_while(|c| "=!~".contains(c));
            self.space();
            if label.is_empty() || !["=", "!=", "=~", "!~"].contains(&operator) || !self.rest.starts_with(['"', '\'']) {
                return Err(format!("a matcher that is none, before {:?}", self.rest));
            }
            self.string()?;
            labels.push(label.to_owned());
        }
    }
}

#[test]
fn names_are_found_wherever_they_stand() {
    let selector = |metric: &str, labels: &[&str]| Selector {
        metric: metric.to_owned(),
        labels: labels.iter().map(|label| (*label).to_owned()).collect(),
    };
    let read = |query: &str| Expression::read(query).unwrap();
    let expected = Expression {
        selectors: vec![selector("a_bucket", &["le", "x"]), selector("b:c", &[])],
        grouping: vec!["m".to_owned(), "n".to_owned(), "job".to_owned()],
    };
    let query =
        "histogram_quantile(0.9, sum by (m, n) (rate(a_bucket{le=\"2.5\", x!~'a}\\'b'}[5m]))) > 1e15 and on (job) b:c";
    assert_eq!(read(query), expected);
    assert_eq!(read("a / on () group_left b offset 5m").selectors, [selector("a", &[]), selector("b", &[])]);
    assert_eq!(read("absent(up) or vector(0) < Inf").selectors, [selector("up", &[])]);
    for odd in ["{a=\"b\"}", "a{b}", "a{b=\"c}", "a[5m", "rate(a$x)", "\"", "a{=\"c\"}", "a{b=c}"] {
        assert!(Expression::read(odd).is_err(), "{odd}");
    }
}
