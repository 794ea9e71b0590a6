//! The rule by which one arm may take the place of another.

/// The gain that a change must be worth.
const GAIN: f64 = 0.03;
/// Contexts at which it must be there.
const LONG: [usize; 2] = [65_536, 131_072];

/// Why a run of these arms and contexts can't be decided on; none if it can.
pub fn refusal(arms: &[String], contexts: &[usize]) -> Option<String> {
    if arms.iter().all(|arm| Some(arm) == arms.first()) {
        return Some("--admit decides on an arm beside the first, want two in --attention".into());
    }
    let missing = LONG.into_iter().find(|long| !contexts.contains(long))?;
    Some(format!(
        "--admit decides at {} and {} tokens, got no {missing}",
        LONG[0], LONG[1]
    ))
}

/// What the rule looks at.
#[derive(Debug, Clone)]
pub struct Measured {
    /// Tests of reading prompts begin with `pp`.
    pub test: String,
    pub context: usize,
    pub arm: String,
    pub rounds: usize,
    /// Time by that of the first arm.
    pub ratio: f64,
    /// Relative.
    pub ratio_spread: f64,
}

/// Whether `arm` may replace the first one, and why not.
pub struct Admission {
    pub arm: String,
    pub reasons: Vec<String>,
}

/// One decision for every arm but the first; none if there is no other.
pub fn decide(rows: &[Measured]) -> Vec<Admission> {
    let Some(first) = rows.first() else {
        return vec![];
    };
    let mut arms: Vec<&str> = Vec::new();
    for row in rows {
        if row.arm != first.arm && !arms.contains(&row.arm.as_str()) {
            arms.push(&row.arm);
        }
    }
    let decide = |arm: &&str| Admission {
        arm: arm.to_string(),
        reasons: reasons(rows.iter().filter(|row| row.arm == **arm)),
    };
    arms.iter().map(decide).collect()
}

/// What speaks against an arm.
fn reasons<'a>(rows: impl Iterator<Item = &'a Measured> + Clone) -> Vec<String> {
    let mut reasons = Vec::new();
    // Reading a prompt is not what long contexts are about, but must not be slower.
    let generates = |row: &&Measured| !row.test.starts_with("pp");
    for long in LONG {
        if !rows
            .clone()
            .filter(generates)
            .any(|row| row.context == long)
        {
            reasons.push(format!("was not measured at {long} tokens"));
        }
    }
    for row in rows {
        let what = format!("{} at {} tokens", row.test, row.context);
        let gain = 1.0 - row.ratio;
        if !gain.is_finite() || row.rounds < 3 {
            reasons.push(format!("{what}: {} rounds, want at least 3", row.rounds));
        } else if generates(&row) && LONG.contains(&row.context) {
            if gain <= GAIN || gain <= row.ratio_spread {
                reasons.push(format!(
                    "{what}: {:.1} % faster, want more than {:.0} % and more than the spread of {:.1} %",
                    100.0 * gain,
                    100.0 * GAIN,
                    100.0 * row.ratio_spread
                ));
            }
        } else if -gain > row.ratio_spread.max(0.01) {
            reasons.push(format!(
                "{what}: {:.1} % slower, with a spread of {:.1} %",
                -100.0 * gain,
                100.0 * row.ratio_spread
            ));
        }
    }
    reasons
}
