//! What the AIBrix gateway plugin knows by name, and what becomes of each name here: the lists behind
//! `docs/migrating-from-aibrix.md`. The start-up report goes by the first of them.

use super::parse;

/// What becomes of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It means the same here.
    Same,
    /// It is here, and differs in what the note says.
    Differs,
    /// It is not here.
    Absent,
}

/// One name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// The name.
    pub(crate) name: &'static str,
    /// Of a variable, the default there; of others, where the name stands.
    pub(crate) there: &'static str,
    /// What becomes of it.
    pub(crate) verdict: Verdict,
    /// How it differs, or why it is absent; empty where there is nothing to say.
    pub(crate) note: &'static str,
}

/// Every variable.
pub(crate) const VARIABLES: &str = include_str!("aibrix/variables.txt");

/// The rows of a list: `name | there | verdict | note`, one a line; `#` begins a comment or, twice, a heading. A line that is
/// no row is passed over (a test finds it).
pub(crate) fn rows(list: &'static str) -> impl Iterator<Item = Row> {
    list.lines().filter_map(row)
}

/// The row in a line.
pub(crate) fn row(line: &'static str) -> Option<Row> {
    let mut fields = line.splitn(4, '|').map(str::trim);
    let (name, there, verdict, note) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let verdict = match verdict {
        "same" => Verdict::Same,
        "differs" => Verdict::Differs,
        "absent" => Verdict::Absent,
        _ => return None,
    };
    (!name.is_empty() && !name.starts_with('#')).then_some(Row { name, there, verdict, note })
}

impl Row {
    /// Whether `value` asks for nothing that is not so anyway: it is the default there, however it is spelled.
    pub(crate) fn asks_for_nothing(&self, value: &str) -> bool {
        value == self.there || parse::boolean(value).is_ok_and(|on| parse::boolean(self.there) == Ok(on))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_has_four_fields() {
        let row = row("A_B | 4 | differs | more | less").unwrap();
        assert_eq!((row.name, row.there, row.verdict, row.note), ("A_B", "4", Verdict::Differs, "more | less"));
        for line in ["", "# a | b | same | c", "A | 4 | same", "A | 4 | other |", " | 4 | same |"] {
            assert_eq!(super::row(line), None, "{line}");
        }
    }

    #[test]
    fn a_default_may_be_spelled_otherwise() {
        let off = row("A | false | absent | x").unwrap();
        for (value, expected) in
            [("false", true), ("0", true), ("F", true), ("true", false), ("", false), ("no", false)]
        {
            assert_eq!(off.asks_for_nothing(value), expected, "{value}");
        }
        let number = row("A | 1 | absent | x").unwrap();
        assert_eq!(["1", "2", "true"].map(|value| number.asks_for_nothing(value)), [true, false, true]);
    }
}
