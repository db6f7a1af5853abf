//! Two facts of a certificate: its serial number, and when it ends. (RFC 5280, section 4.1; DER is X.690.)
//!
//! The fields up to the validity stand in a fixed order, so that a full parser is not needed. Whatever is unusual comes
//! out as `None`.

use std::fmt::Write as _;

/// What is told of a listener's certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Serial number, hexadecimal.
    pub serial: String,
    /// The end of its validity, seconds since the Unix epoch; negative before it.
    pub expires: i64,
}

const INTEGER: u8 = 0x02;
const UTC_TIME: u8 = 0x17;
const GENERALIZED_TIME: u8 = 0x18;
const SEQUENCE: u8 = 0x30;
/// `[0] EXPLICIT`, in which the version stands.
const VERSION: u8 = 0xa0;

/// Reads a certificate in DER form.
pub fn facts(der: &[u8]) -> Option<Facts> {
    let (certificate, _) = expect(der, SEQUENCE)?;
    let (mut fields, _) = expect(certificate, SEQUENCE)?;
    if let Some((_, rest)) = expect(fields, VERSION) {
        fields = rest;
    }
    let (serial, fields) = expect(fields, INTEGER)?;
    let (_signature, fields) = expect(fields, SEQUENCE)?;
    let (_issuer, fields) = expect(fields, SEQUENCE)?;
    let (validity, _) = expect(fields, SEQUENCE)?;
    let (_, _not_before, rest) = element(validity)?;
    let (kind, not_after, _) = element(rest)?;
    let serial = serial.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    });
    Some(Facts { serial, expires: time(kind, not_after)? })
}

/// The content of the first element, which must have that tag, and what follows it.
fn expect(der: &[u8], tag: u8) -> Option<(&[u8], &[u8])> {
    element(der).and_then(|(found, content, rest)| (found == tag).then_some((content, rest)))
}

/// Tag, content and rest of the first element.
fn element(der: &[u8]) -> Option<(u8, &[u8], &[u8])> {
    let (&[tag, first], rest) = der.split_first_chunk::<2>()?;
    let (length, rest) = if first < 0x80 {
        (usize::from(first), rest)
    } else {
        // The long form: so many bytes of length. Four are more than a certificate can have.
        let (bytes, rest) = rest.split_at_checked(usize::from(first & 0x7f))?;
        if bytes.is_empty() || bytes.len() > 4 {
            return None;
        }
        (bytes.iter().fold(0, |length, byte| length << 8 | usize::from(*byte)), rest)
    };
    let (content, rest) = rest.split_at_checked(length)?;
    Some((tag, content, rest))
}

/// `YYMMDDHHMMSSZ` (1950 to 2049) or `YYYYMMDDHHMMSSZ`, the only forms that certificates may use.
fn time(kind: u8, text: &[u8]) -> Option<i64> {
    let digits = text.strip_suffix(b"Z").filter(|digits| digits.iter().all(u8::is_ascii_digit))?;
    let pairs: Vec<i64> = digits.chunks(2).filter_map(|pair| std::str::from_utf8(pair).ok()?.parse().ok()).collect();
    let (year, rest) = match (kind, digits.len(), pairs.as_slice()) {
        (UTC_TIME, 12, [year, rest @ ..]) => (if *year < 50 { 2000 + year } else { 1900 + year }, rest),
        (GENERALIZED_TIME, 14, [century, year, rest @ ..]) => (century * 100 + year, rest),
        _ => return None,
    };
    let [month @ 1..=12, day @ 1..=31, hour @ 0..=23, minute @ 0..=59, second @ 0..=60] = *rest else { return None };
    Some(((days(year, month, day) * 24 + hour) * 60 + minute) * 60 + second)
}

/// Days from 1970-01-01 in the Gregorian calendar, whose years begin in March here, so that the leap day is the last.
fn days(year: i64, month: i64, day: i64) -> i64 {
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let of_year = (153 * month + 2) / 5 + day - 1;
    year * 365 + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400) + of_year - 719_468
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_since_the_epoch() {
        for (kind, text, expected) in [
            (UTC_TIME, "700101000000Z", Some(0)),
            (UTC_TIME, "691231235959Z", Some(-1)),
            (UTC_TIME, "491231235959Z", Some(2_524_607_999)),
            (UTC_TIME, "500101000000Z", Some(-631_152_000)),
            (UTC_TIME, "000229120000Z", Some(951_825_600)),
            (GENERALIZED_TIME, "20500101000000Z", Some(2_524_608_000)),
            (GENERALIZED_TIME, "99991231235959Z", Some(253_402_300_799)),
            (GENERALIZED_TIME, "20240301000000Z", Some(1_709_251_200)),
            (GENERALIZED_TIME, "700101000000Z", None),
            (UTC_TIME, "20500101000000Z", None),
            (UTC_TIME, "701301000000Z", None),
            (UTC_TIME, "700100000000Z", None),
            (UTC_TIME, "700101240000Z", None),
            (UTC_TIME, "7001010000Z", None),
            (UTC_TIME, "700101000000+0100", None),
            (UTC_TIME, "70-101000000Z", None),
            (UTC_TIME, "", None),
            (INTEGER, "700101000000Z", None),
        ] {
            assert_eq!(time(kind, text.as_bytes()), expected, "{kind:x} {text}");
        }
    }

    #[test]
    fn lengths_are_short_or_long_and_never_beyond_the_end() {
        let long = [&[SEQUENCE, 0x82, 0x01, 0x00][..], &[7; 256]].concat();
        for (der, expected) in [
            (&[SEQUENCE, 0][..], Some(0)),
            (&[SEQUENCE, 2, 1, 2, 3][..], Some(2)),
            (&[SEQUENCE, 0x81, 1, 9][..], Some(1)),
            (&long[..], Some(256)),
            (&long[..259], None),
            (&[SEQUENCE, 1][..], None),
            (&[SEQUENCE, 0x80][..], None),
            (&[SEQUENCE, 0x85, 0, 0, 0, 0, 1, 7][..], None),
            (&[SEQUENCE, 0x84, 0xff, 0xff, 0xff, 0xff, 7][..], None),
            (&[SEQUENCE][..], None),
            (&[][..], None),
        ] {
            assert_eq!(element(der).map(|(_, content, _)| content.len()), expected, "{der:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn no_bytes_make_it_fall(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            let _ = facts(&bytes);
        }
    }
}
