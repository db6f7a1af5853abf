//! Rows of the Azure LLM inference traces (Azure/AzurePublicDataset).

use std::sync::Arc;

use super::Row;

/// The first column's title.
pub(super) const TIMESTAMP: &str = "TIMESTAMP";

const SECOND: i128 = 1_000_000_000;

/// Reads one row; `None` for the header. Columns beyond the third are left alone.
pub(super) fn row(line: &str) -> Result<Option<Row>, String> {
    let mut columns = line.trim_start_matches('\u{feff}').split(',').map(str::trim);
    let mut column = |name: &str| columns.next().ok_or_else(|| format!("no {name}"));
    let time = column("time")?;
    let prompt = column("context tokens")?;
    let output = column("generated tokens")?;
    if time == TIMESTAMP {
        return Ok(None);
    }
    let count = |text: &str| text.parse::<u64>().map_err(|_| format!("{text:?} is not a number of tokens"));
    let nanos = nanos(time).ok_or_else(|| format!("{time:?} is not a time of the form 2023-11-16 18:15:46.68"))?;
    Ok(Some(Row { nanos, prompt: count(prompt)?, output: count(output)?, hashes: Arc::default() }))
}

/// Nanoseconds since 1970 of `YYYY-MM-DD hh:mm:ss[.fraction][+00:00]`.
fn nanos(text: &str) -> Option<i128> {
    let text = text.strip_suffix("+00:00").or_else(|| text.strip_suffix('Z')).unwrap_or(text);
    let (date, time) = text.split_once([' ', 'T'])?;
    let [year, month, day] = numbers(date, '-')?;
    let (clock, fraction) = time.split_once('.').unwrap_or((time, ""));
    let [hour, minute, second] = numbers(clock, ':')?;
    let in_range = (1970..=9999).contains(&year) && (1..=12).contains(&month) && (1..=31).contains(&day);
    if !in_range || hour > 23 || minute > 59 || second > 60 {
        return None;
    }
    let seconds = ((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second;
    Some(i128::from(seconds) * SECOND + i128::from(fraction_nanos(fraction)?))
}

fn numbers(text: &str, separator: char) -> Option<[i64; 3]> {
    let mut parts =
        text.split(separator).map(|part| part.bytes().all(|b| b.is_ascii_digit()).then_some(part)?.parse().ok());
    let numbers = [parts.next()??, parts.next()??, parts.next()??];
    parts.next().is_none().then_some(numbers)
}

/// `.5` is half a second; what is beyond nanoseconds is cut.
fn fraction_nanos(digits: &str) -> Option<u32> {
    let all_digits = digits.bytes().all(|byte| byte.is_ascii_digit());
    let padded: String = digits.chars().chain("000000000".chars()).take(9).collect();
    if all_digits { padded.parse().ok() } else { None }
}

/// Days from 1970-01-01 in the Gregorian calendar: the year is taken to begin in March, so that its leap day is last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let year = if month > 2 { year } else { year - 1 };
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    year * 365 + year / 4 - year / 100 + year / 400 + day_of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (text, expected) in [
            ("1970-01-01 00:00:00", Some(0)),
            ("1970-01-02 00:00:01.5", Some(86_401 * SECOND + 500_000_000)),
            ("2023-11-16 18:15:46.6805900", Some(1_700_158_546 * SECOND + 680_590_000)),
            ("2024-02-29 23:59:59.009930+00:00", Some(1_709_251_199 * SECOND + 9_930_000)),
            ("2024-03-01T00:00:00Z", Some(1_709_251_200 * SECOND)),
            ("2024-03-01 00:00:00.0000000019", Some(1_709_251_200 * SECOND + 1)),
            ("2024-03-01", None),
            ("2024-03-01 00:00", None),
            ("2024-13-01 00:00:00", None),
            ("2024-03-01 24:00:00", None),
            ("2024-03-01 00:00:00.5x", None),
            ("2024-03-+1 00:00:00", None),
            ("2024-03-01 00:00:00+02:00", None),
            ("", None),
        ] {
            assert_eq!(nanos(text), expected, "{text}");
        }
    }
}
