//! `strftime_now`: the calendar without a time zone library.

/// The moment a rendering takes for now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Clock {
    /// Seconds since 1970-01-01 00:00 UTC.
    pub unix_seconds: i64,
    /// What local time is ahead of UTC, in seconds. Templates print local dates; 0 prints UTC.
    pub utc_offset_seconds: i32,
}

impl Clock {
    /// The system's time in UTC.
    #[must_use]
    pub fn now() -> Self {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Self {
            unix_seconds: since.map_or(0, |d| i64::try_from(d.as_secs()).unwrap_or(0)),
            utc_offset_seconds: 0,
        }
    }

    /// `strftime` in the C locale. Unknown directives are printed as they are, as glibc does.
    pub(crate) fn format(self, format: &str) -> String {
        use std::fmt::Write as _;
        let date = Date::of(self.unix_seconds.saturating_add(i64::from(self.utc_offset_seconds)));
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let rest = chars.as_str();
            let flag = rest.chars().next().filter(|f| matches!(f, '-' | '_' | '0' | '^'));
            if flag.is_some() {
                chars.next();
            }
            let Some(directive) = chars.next() else {
                out.push('%');
                out.extend(flag);
                break;
            };
            let number = |value: i64, width: usize, pad: char| match flag {
                Some('-') => value.to_string(),
                Some('_') => format!("{value:>width$}"),
                Some('0') => format!("{value:0>width$}"),
                _ if pad == ' ' => format!("{value:>width$}"),
                _ => format!("{value:0>width$}"),
            };
            let hour12 = (date.hour + 11) % 12 + 1;
            let text = match directive {
                'Y' => number(date.year, 1, '0'),
                'C' => number(date.year.div_euclid(100), 2, '0'),
                'y' => number(date.year.rem_euclid(100), 2, '0'),
                'm' => number(date.month, 2, '0'),
                'd' => number(date.day, 2, '0'),
                'e' => number(date.day, 2, ' '),
                'H' => number(date.hour, 2, '0'),
                'k' => number(date.hour, 2, ' '),
                'I' => number(hour12, 2, '0'),
                'l' => number(hour12, 2, ' '),
                'M' => number(date.minute, 2, '0'),
                'S' => number(date.second, 2, '0'),
                'f' => "000000".to_owned(),
                'j' => number(date.year_day + 1, 3, '0'),
                'u' => number((date.week_day + 6) % 7 + 1, 1, '0'),
                'w' => number(date.week_day, 1, '0'),
                'U' => number((date.year_day + 7 - date.week_day) / 7, 2, '0'),
                'W' => number((date.year_day + 7 - (date.week_day + 6) % 7) / 7, 2, '0'),
                'A' => WEEK_DAYS[date.week_day as usize].to_owned(),
                'a' => WEEK_DAYS[date.week_day as usize][..3].to_owned(),
                'B' => MONTHS[date.month as usize - 1].to_owned(),
                'b' | 'h' => MONTHS[date.month as usize - 1][..3].to_owned(),
                'p' => if date.hour < 12 { "AM" } else { "PM" }.to_owned(),
                'P' => if date.hour < 12 { "am" } else { "pm" }.to_owned(),
                's' => self.unix_seconds.to_string(),
                'n' => "\n".to_owned(),
                't' => "\t".to_owned(),
                '%' => "%".to_owned(),
                'F' => self.format("%Y-%m-%d"),
                'T' | 'X' => self.format("%H:%M:%S"),
                'R' => self.format("%H:%M"),
                'r' => self.format("%I:%M:%S %p"),
                'D' | 'x' => self.format("%m/%d/%y"),
                'c' => self.format("%a %b %e %H:%M:%S %Y"),
                // Python's naive local time has no zone.
                'z' | 'Z' => String::new(),
                other => {
                    out.push('%');
                    out.extend(flag);
                    out.push(other);
                    continue;
                }
            };
            if flag == Some('^') {
                out.push_str(&text.to_uppercase());
            } else {
                // Writing to a string cannot fail.
                let _ = write!(out, "{text}");
            }
        }
        out
    }
}

const WEEK_DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

struct Date {
    year: i64,
    /// 1..=12.
    month: i64,
    /// 1..=31.
    day: i64,
    hour: i64,
    minute: i64,
    second: i64,
    /// 0 is Sunday.
    week_day: i64,
    /// 0 is the first of January.
    year_day: i64,
}

impl Date {
    /// Proleptic Gregorian calendar; days are counted from the first of March of year 0, so that the
    /// leap day ends a year.
    fn of(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let time = seconds.rem_euclid(86_400);
        let shifted = days + 719_468;
        let era = shifted.div_euclid(146_097);
        let day_of_era = shifted.rem_euclid(146_097);
        let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
        let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
        let month_from_march = (5 * day_of_year + 2) / 153;
        let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
        let month = (month_from_march + 2) % 12 + 1;
        let year = year_of_era + era * 400 + i64::from(month <= 2);
        let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
        let year_day = if month <= 2 { day_of_year - 306 } else { day_of_year + 59 + i64::from(leap) };
        Self {
            year,
            month,
            day,
            hour: time / 3600,
            minute: time / 60 % 60,
            second: time % 60,
            week_day: (days + 4).rem_euclid(7),
            year_day,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(unix_seconds: i64, format: &str) -> String {
        Clock { unix_seconds, utc_offset_seconds: 0 }.format(format)
    }

    #[test]
    fn known_days() {
        assert_eq!(at(0, "%F %T %A %j"), "1970-01-01 00:00:00 Thursday 001");
        assert_eq!(at(951_782_400, "%F %a %j"), "2000-02-29 Tue 060");
        assert_eq!(at(1_709_251_199, "%F %T %U %W"), "2024-02-29 23:59:59 08 09");
        assert_eq!(at(-1, "%F %T"), "1969-12-31 23:59:59");
        assert_eq!(at(1_735_603_200, "%-d %B %y, %I %p, %^a %Q %"), "31 December 24, 12 AM, TUE %Q %");
        let ahead = Clock { unix_seconds: 0, utc_offset_seconds: 3600 };
        assert_eq!(ahead.format("%H:%M"), "01:00");
    }
}
