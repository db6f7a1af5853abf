//! From text to values: pure. An error is the text "expected …" for the warning.

use std::time::Duration;

use super::{BucketServeMode, DecodePolicy, PrefillPolicy};

/// What was expected instead.
pub(super) type Expected = &'static str;

/// Go's `strconv.ParseBool`, which the reference gateway uses.
pub(super) fn boolean(text: &str) -> Result<bool, Expected> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err("true or false"),
    }
}

/// A whole number above 0.
pub(super) fn positive_integer(text: &str) -> Result<u64, Expected> {
    text.parse().ok().filter(|number| *number > 0).ok_or("a whole number above 0")
}

/// [`positive_integer`] that fits an address space.
pub(super) fn positive_size(text: &str) -> Result<usize, Expected> {
    positive_integer(text)
        .and_then(|number| usize::try_from(number).map_err(|_| "a smaller number"))
        .map_err(|_| "a whole number above 0")
}

/// A finite number above 0.
pub(super) fn positive_number(text: &str) -> Result<f64, Expected> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0).ok_or("a finite number above 0")
}

/// A finite number, 0 included.
pub(super) fn weight(text: &str) -> Result<f64, Expected> {
    text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0).ok_or("a finite number, 0 or more")
}

/// A whole percentage.
pub(super) fn percentage(text: &str) -> Result<u8, Expected> {
    text.parse().ok().filter(|percent| *percent <= 100).ok_or("a whole number from 0 to 100")
}

/// Most tokens that one charge can be given: many of them still add up without overflow.
pub const MAX_TOKENS: u64 = 1 << 40;

/// A number of tokens above 0.
pub(super) fn positive_tokens(text: &str) -> Result<u64, Expected> {
    positive_integer(text).and_then(|tokens| if tokens <= MAX_TOKENS { Ok(tokens) } else { Err("fewer tokens") })
}

/// A number of sessions that fits a gigabyte.
pub(super) fn sessions(text: &str) -> Result<usize, Expected> {
    positive_size(text).ok().filter(|sessions| *sessions <= 1 << 27).ok_or("a whole number from 1 to 134217728")
}

/// A number from 0 to 1, both included.
pub(super) fn share(text: &str) -> Result<f64, Expected> {
    text.parse().ok().filter(|share| (0.0..=1.0).contains(share)).ok_or("a number from 0 to 1")
}

/// A prefill policy, in any case, as profiles spell it.
pub(super) fn prefill_policy(text: &str) -> Result<PrefillPolicy, Expected> {
    PrefillPolicy::parse(&text.to_ascii_lowercase())
        .ok_or("one of prefix_cache, least_request, conductor, token_load, hybrid_cache_load")
}

/// The same for decode.
pub(super) fn decode_policy(text: &str) -> Result<DecodePolicy, Expected> {
    DecodePolicy::parse(&text.to_ascii_lowercase()).ok_or("one of load_balancing, least_request, conductor, token_load")
}

/// The unit of adaptive bucket serving, in any case.
pub(super) fn bucket_serve_mode(text: &str) -> Result<BucketServeMode, Expected> {
    match text.to_ascii_lowercase().as_str() {
        "throughput" => Ok(BucketServeMode::Throughput),
        "rps" => Ok(BucketServeMode::Rps),
        _ => Err("throughput or rps"),
    }
}

/// Any unsigned 64-bit number.
pub(super) fn any_u64(text: &str) -> Result<u64, Expected> {
    text.parse().map_err(|_| "an unsigned 64-bit number")
}

// Times are bounded to 32 bits of their unit, so that no sum of them leaves the time line.
const EXPECTED_TIME: Expected = "a whole number from 1 to 4294967295";

/// Whole milliseconds above 0.
pub(super) fn milliseconds(text: &str) -> Result<Duration, Expected> {
    text.parse::<u32>().ok().filter(|n| *n > 0).map(|n| Duration::from_millis(n.into())).ok_or(EXPECTED_TIME)
}

/// A duration as Go writes it (`1m30s`, `500ms`, `0.5s`), above 0 and up to a day.
pub(super) fn go_duration(text: &str) -> Result<Duration, Expected> {
    const EXPECTED: Expected = "a duration above 0 and up to a day such as 10s, 500ms or 1m30s";
    const UNITS: [(&str, f64); 6] =
        [("ns", 1e-9), ("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("m", 60.0), ("h", 3600.0)];
    let (mut rest, mut seconds) = (text, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or(EXPECTED)?;
        let (number, tail) = rest.split_at(digits);
        let number: f64 = number.parse().map_err(|_| EXPECTED)?;
        let (unit, factor) = UNITS
            .into_iter()
            .find(|(unit, _)| tail.starts_with(unit))
            .or(tail.starts_with('s').then_some(("s", 1.0)))
            .ok_or(EXPECTED)?;
        seconds += number * factor;
        rest = tail.strip_prefix(unit).unwrap_or_default();
    }
    Some(seconds).filter(|seconds| *seconds > 0.0 && *seconds <= 86_400.0).map(Duration::from_secs_f64).ok_or(EXPECTED)
}

/// Whole seconds above 0.
pub(super) fn seconds(text: &str) -> Result<Duration, Expected> {
    text.parse::<u32>().ok().filter(|n| *n > 0).map(|n| Duration::from_secs(n.into())).ok_or(EXPECTED_TIME)
}

/// Whole seconds, 0 allowed.
pub(super) fn seconds_or_zero(text: &str) -> Result<Duration, Expected> {
    text.parse::<u32>().map(|n| Duration::from_secs(n.into())).map_err(|_| "a whole number from 0 to 4294967295")
}

/// Whole minutes above 0.
pub(super) fn minutes(text: &str) -> Result<Duration, Expected> {
    text.parse::<u32>().ok().filter(|n| *n > 0).map(|n| Duration::from_secs(u64::from(n) * 60)).ok_or(EXPECTED_TIME)
}

/// Seconds with decimals, above 0.
pub(super) fn decimal_seconds(text: &str) -> Result<Duration, Expected> {
    let seconds = positive_number(text)?;
    if seconds > f64::from(u32::MAX) {
        return Err("a finite number above 0 and below 4294967296");
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// Seconds with decimals, 0 allowed.
pub(super) fn decimal_seconds_or_zero(text: &str) -> Result<Duration, Expected> {
    let seconds = text.parse().ok().filter(|seconds: &f64| (0.0..=f64::from(u32::MAX)).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("a number from 0 to 4294967295")
}

/// Names of namespaces (DNS labels), each once; none is fine.
pub(super) fn namespaces(text: &str) -> Result<Vec<String>, Expected> {
    const EXPECTED: Expected = "at most 64 names of namespaces, separated by commas";
    let mut names: Vec<String> = Vec::new();
    for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let letter = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        let bytes = name.as_bytes();
        let ends = bytes.first().zip(bytes.last()).is_some_and(|(first, last)| letter(*first) && letter(*last));
        if bytes.len() > 63 || !ends || !bytes.iter().all(|byte| letter(*byte) || *byte == b'-') {
            return Err(EXPECTED);
        }
        if !names.iter().any(|known| known == name) {
            names.push(name.to_owned());
        }
    }
    if names.len() > 64 { Err(EXPECTED) } else { Ok(names) }
}

/// A network port.
pub(super) fn port(text: &str) -> Result<u16, Expected> {
    text.parse().ok().filter(|port| *port > 0).ok_or("a whole number from 1 to 65535")
}

/// How many failures in a row; 0 = never.
pub(super) fn count_or_zero(text: &str) -> Result<u32, Expected> {
    text.parse().map_err(|_| "a whole number from 0 to 4294967295")
}

/// Comma-separated `key=value` pairs with percent-encoded values: `OTEL_RESOURCE_ATTRIBUTES` and the OTLP headers.
pub(super) fn pairs(text: &str) -> Result<Vec<(String, String)>, Expected> {
    const EXPECTED: Expected = "comma-separated key=value pairs";
    let mut pairs = Vec::new();
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let (key, value) = part.split_once('=').ok_or(EXPECTED)?;
        let key = key.trim();
        if key.is_empty() {
            return Err(EXPECTED);
        }
        pairs.push((key.to_owned(), percent_decode(value.trim())));
    }
    Ok(pairs)
}

/// Decodes `%41`; what is no such escape, or would not be UTF-8, stays as it is.
fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let [first, tail @ ..] = rest {
        rest = tail;
        if *first == b'%'
            && let [high, low, after @ ..] = tail
            && let (Some(high), Some(low)) = (hex(*high), hex(*low))
        {
            bytes.push(high << 4 | low);
            rest = after;
        } else {
            bytes.push(*first);
        }
    }
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

/// Most origins of one list.
const MAX_ORIGINS: usize = 64;

/// Origins as browsers send them, comma-separated, or `*` alone.
pub(super) fn origins(text: &str) -> Result<Vec<String>, Expected> {
    const EXPECTED: Expected = "* or at most 64 origins such as https://chat.example.com, without a path";
    let origins: Vec<String> = text.split(',').map(|origin| origin.trim().to_owned()).collect();
    let usable = |origin: &String| {
        let uri: Option<http::Uri> = origin.parse().ok();
        let parts = uri.as_ref().and_then(|uri| Some((uri.scheme_str()?, uri.authority()?)));
        // Browsers send lower case, and leave the scheme's own port out.
        parts.is_some_and(|(scheme, authority)| {
            let standard = if scheme == "https" { 443 } else { 80 };
            matches!(scheme, "http" | "https")
                && authority.port_u16() != Some(standard)
                && authority.as_str().bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-.:[]".contains(&byte))
                && *origin == format!("{scheme}://{authority}").to_ascii_lowercase()
        })
    };
    if origins == ["*"] || (origins.len() <= MAX_ORIGINS && origins.iter().all(usable)) {
        Ok(origins)
    } else {
        Err(EXPECTED)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_as_browsers_send_them() {
        for text in ["*", "https://a.example", "http://localhost:3000", "https://a.example, https://b.example:8443"] {
            assert_eq!(origins(text).unwrap().join(", "), text);
        }
        let many = vec!["https://a.example"; 65].join(",");
        for text in [
            "a.example",
            "https://a.example/",
            "https://a.example/chat",
            "https://A.example",
            "https://a.example:443",
            "http://a.example:80",
            "ftp://a.example",
            "*,https://a.example",
            "https://*.example",
            "https://a.example,",
            "null",
            &many,
        ] {
            assert!(origins(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_follow_go() {
        for (text, millis) in [
            ("10s", 10_000),
            ("500ms", 500),
            ("1m30s", 90_000),
            ("0.5s", 500),
            ("1.5h", 5_400_000),
            ("24h", 86_400_000),
            ("1500us", 1),
        ] {
            assert_eq!(go_duration(text).map(|time| time.as_millis()), Ok(millis), "{text}");
        }
        for text in ["", "10", "s", "0s", "-1s", "24h1ns", "1.2.3s", "10 s", "1d", "1e3s"] {
            assert!(go_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn booleans_follow_go() {
        for text in ["1", "t", "T", "true", "TRUE", "True"] {
            assert_eq!(boolean(text), Ok(true), "{text}");
        }
        for text in ["0", "f", "F", "false", "FALSE", "False"] {
            assert_eq!(boolean(text), Ok(false), "{text}");
        }
        for text in ["yes", "no", "on", "tRUE", "2", " true"] {
            assert!(boolean(text).is_err(), "{text}");
        }
    }

    #[test]
    fn numbers_have_exact_borders() {
        assert_eq!(positive_integer("1"), Ok(1));
        for text in ["0", "-1", "1.5", "", "1e3", "18446744073709551616"] {
            assert!(positive_integer(text).is_err(), "{text}");
        }
        assert_eq!(positive_number("0.0001"), Ok(0.0001));
        for text in ["0", "-0.0", "-1", "NaN", "inf", "-inf", "1e999", "x"] {
            assert!(positive_number(text).is_err(), "{text}");
        }
        assert_eq!((percentage("0"), percentage("100")), (Ok(0), Ok(100)));
        for text in ["101", "-1", "256", "50%", "NaN"] {
            assert!(percentage(text).is_err(), "{text}");
        }
        assert_eq!(any_u64("18446744073709551615"), Ok(u64::MAX));
        assert!(any_u64("-1").is_err());
    }

    #[test]
    fn times_stay_on_the_time_line() {
        assert_eq!(seconds("4294967295"), Ok(Duration::from_secs(4_294_967_295)));
        for parse in [seconds, milliseconds, minutes] {
            for text in ["0", "4294967296", "-1", "30s", "1.5"] {
                assert!(parse(text).is_err(), "{text}");
            }
        }
        assert_eq!(seconds_or_zero("0"), Ok(Duration::ZERO));
        assert!(seconds_or_zero("-1").is_err());
        assert_eq!(minutes("4294967295").unwrap().as_secs(), 4_294_967_295 * 60);
        assert_eq!(decimal_seconds("0.25"), Ok(Duration::from_millis(250)));
        for text in ["NaN", "inf", "0", "-2", "1e300", "4294967296"] {
            assert!(decimal_seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn pairs_are_percent_decoded() {
        let parsed = pairs("a=b, c = d%20e ,,x=%zz%4").unwrap();
        let expected = [("a", "b"), ("c", "d e"), ("x", "%zz%4")];
        assert_eq!(parsed, expected.map(|(k, v)| (k.to_owned(), v.to_owned())));
        assert_eq!(pairs("").unwrap(), []);
        assert_eq!(pairs("k=%ff").unwrap(), [("k".to_owned(), "%ff".to_owned())]);
        for text in ["a", "=b", "a=b,c"] {
            assert!(pairs(text).is_err(), "{text}");
        }
    }
}
