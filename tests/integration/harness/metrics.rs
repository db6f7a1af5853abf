//! Reads the Prometheus text format.

use std::collections::BTreeMap;

/// One sample line.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// One scrape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Metrics(pub Vec<Sample>);

impl Metrics {
    /// Parses a page; a line that is neither a comment nor a sample is an error.
    pub fn parse(text: &str) -> Result<Metrics, String> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        lines.map(|line| sample(line).ok_or_else(|| line.to_owned())).collect::<Result<_, _>>().map(Metrics)
    }

    /// All samples of a metric that carry these labels.
    pub fn matching<'a>(&'a self, name: &'a str, labels: &'a [(&str, &str)]) -> impl Iterator<Item = &'a Sample> {
        self.0.iter().filter(move |sample| {
            sample.name == name && labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|v| v == value))
        })
    }

    /// Their sum; 0 when there is none.
    pub fn sum(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.matching(name, labels).map(|sample| sample.value).sum()
    }

    /// Is there any sample of this name?
    pub fn has(&self, name: &str) -> bool {
        self.0.iter().any(|sample| sample.name == name)
    }
}

fn sample(line: &str) -> Option<Sample> {
    let (name, mut rest) = match line.find(['{', ' ']) {
        Some(at) => line.split_at(at),
        None => return None,
    };
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            rest = rest.trim_start_matches([',', ' ']);
            if let Some(after) = rest.strip_prefix('}') {
                rest = after;
                break;
            }
            let (key, after) = rest.split_once("=\"")?;
            let (value, after) = quoted(after)?;
            labels.insert(key.to_owned(), value);
            rest = after;
        }
    }
    let value = rest.split_whitespace().next()?.parse().ok()?;
    Some(Sample { name: name.to_owned(), labels, value })
}

/// The text up to the closing quote, unescaped, and what follows it.
fn quoted(text: &str) -> Option<(String, &str)> {
    let mut value = String::new();
    let mut characters = text.char_indices();
    while let Some((at, character)) = characters.next() {
        match character {
            '"' => return Some((value, &text[at + 1..])),
            '\\' => value.push(match characters.next()?.1 {
                'n' => '\n',
                other => other,
            }),
            other => value.push(other),
        }
    }
    None
}

#[test]
fn parses_labels_escapes_and_special_values() {
    let page = "# HELP a b\n# TYPE a gauge\na 1\na{x=\"1\",y=\"q\\\"{},\\\\\\n\"} -2.5 1700000000\nb{} +Inf\n";
    let metrics = Metrics::parse(page).unwrap();
    assert_eq!(metrics.0.len(), 3);
    assert_eq!(metrics.sum("a", &[]), -1.5);
    assert_eq!(metrics.sum("a", &[("y", "q\"{},\\\n")]), -2.5);
    assert_eq!(metrics.sum("a", &[("x", "2")]), 0.0);
    assert!(metrics.has("b") && !metrics.has("c"));
    assert_eq!(metrics.matching("b", &[]).next().unwrap().value, f64::INFINITY);
    for bad in ["a", "a{x=\"1\" 2", "a{x=\"1\"} y", "a{x} 1"] {
        assert_eq!(Metrics::parse(bad), Err(bad.to_owned()));
    }
}
