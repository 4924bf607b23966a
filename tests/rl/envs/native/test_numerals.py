"""Numbers in answers: every notation of the expected number earns the reward, and no other number does."""

import time

import pytest

from rl.envs.native import numerals, rewards

# (expected answer, completions that are paid, completions that are not)
CASES = [
    ("1/2", ["0.5", "\\frac{1}{2}", "$\\dfrac12$", "½"], ["7/2", "The answer is 2"]),
    ("25 m^2", ["The area is 25 m^2."], ["The area is 7 m^2"]),
    ("5 mol CO2", ["5 mol of CO2"], ["2"]),
    ("500", ["in 2020, 500 people", "Rs.500", "US$500"], ["\\boxed{9{,}500}", "5,00"]),
    ("9500", ["9{,}500"], []),
    ("12500", ["12\\,500", "12 500", "12\xa0500", "12\u202f500"], []),
    (
        "-5",
        ["–5", "- 5", "the answer is -5", "the answer is - 5", "x = -5", "x=-5", "f(3) -5"],
        ["10 - 5", "5 – the answer"],
    ),
    ("123", [], ["1,2,3"]),
    ("3", [], ["1,2,3", "3:45", "2024-05-03", "1.2.3", "2\\sqrt{3}"]),
    ("3/2", ["1 1/2", "1½", "1\\frac{1}{2}"], []),
    ("-3/2", ["-\\frac{3}{2}", "-1 1/2"], []),
    ("1/3", [], ["0.333"]),
    ("0.1", ["1/10", "10%"], []),
    ("50%", ["0.5", "50", "50 percent"], ["0.5%"]),
    ("50", ["50\\%"], []),
    ("1,000", ["1000.0"], []),
    ("1000", ["1e3", "1 \\times 10^3"], []),
    ("300000", ["3 \\times 10^{5}", "3×10⁵", "3*10^5", "3 x 10^5"], []),
    ("100000", ["10^5", "10^{5}"], []),
    (
        "5",
        "x_1 = 5|5 x_1|10 - 5 = 5|f(3)-5|$\\boxed{5}$, as 3 < 4|$5/hour|USD 5|5 – the answer|answer – 5".split("|"),
        ["10^5", "3-5", "±5", "\\pm 5", "x_1", "1234,5", "10 - 5", "3 + 5", "4 or 5", "\\boxed{6}, not 5"],
    ),
    ("8", ["2**3", "**8**", "__8__", "*8*", "`8`", "**Answer:** 8", "The answer is **8**.", "= **$8.00**"], []),
    ("1000000", ["1.000.000", "1'000'000", "1,000,000", "1 million"], []),
    ("5 million", ["5,000,000"], ["5"]),
    ("2500000000", ["$2.5 billion"], []),
    ("45", [], ["3:45"]),
    (
        "4",
        ["3, 4", "\\boxed{x = 3 + 1 = 4}"],
        ["(5, 4)", "[1, 2, 4]", "\\boxed{3, 4}", "\\boxed{3;4}", "\\boxed{3 \\text{ and } 4}"],
    ),
    (
        "2",
        [],
        ["\\sqrt{2}", "√2", "\\frac{x}{2}", "\\frac{\\sqrt{3}}{2}", "2\\pi", "2π", "2\\sqrt{3}", "CO2", "m^2", "s^-2"],
    ),
    ("1", [], ["x_1", "1/0", "1e9999"]),
    ("19", [], ["COVID-19"]),
    ("-2", [], ["m^{-2}"]),
    (
        "18",
        '答案是18个|１８|18th|\\(18\\)|$18$|$18.|18 dollars|18.0|<answer>18</answer>|{"answer": 18}|18!'.split("|"),
        [],
    ),
    ("-18", ["$-18$", "-$18", "$-18", "- $18", "−18", "-**18**"], []),
    ("90", ["90^\\circ", "90°"], []),
    ("1/4", ["25%"], []),
    ("60", ["60 km/h"], []),
    ("10000", ["10,\\!000"], []),
    ("25", ["25\\text{ cm}^2", "25 \\mathrm{~m}^{2}"], []),
    ("7", ["1/0 = 7", "The roots are 3 and 7"], []),
    ("0", ["0/5"], []),
    ("1234.5", ["1,234.5"], []),
    ("0.5", [".5"], ["...5"]),
    ("1e16", ["1E16"], []),
    ("9999", [], ["1e9999"]),
    ("3.14", [], ["3.14159"]),
    ("72", ["#### 72"], []),
    ("1", [], ["1_000", "12_34", "0+1"]),
    ("1000", ["1_000"], []),
    ("-5", ["negative 5", "minus 5"], ["5"]),
    ("5", ["10 minus 5", "5 percentage points"], ["negative 5", "10+5"]),
    ("-1/2", ["−½"], ["½"]),
    ("1/1000", ["10⁻³"], ["10³"]),
    ("5000", ["5.0x10³"], ["5.0"]),
    ("2/3", ["2 / 3", "\\frac23"], ["3"]),
    ("3", [], ["(1,\n3)"]),
    ("1/200", ["0.5%"], ["0.5"]),
    ("42", ["$42.00$."], ["42,000"]),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), CASES)
def test_a_completion_is_paid_for_the_expected_number_alone(answer, right, wrong):
    reward = rewards.make("number")
    rewards.check_answer("number", answer)
    assert {text: reward(text, answer, {}) for text in [*right, *wrong]} == dict.fromkeys(right, 1) | dict.fromkeys(
        wrong, 0
    )


EXACT = ["3:45", "4 PM", "3h20", "2024-01-05", "July 4", "Jan 5", "five", "Paris", "noon", "5'10\"", "1.2.3"]
OTHERS = (
    "(3, 4)|1,2,3|5 or 6|3 hours 20 minutes|July 4, 2024|2:1|3-5|\\sqrt{2}|2\\pi|2 pi|x+1|5x|3x^2|x > 5|x - 5|"
    "5 - n|±3|[1, 2]|{1, 2}|1, 2|0.333...|0.\\overline{3}|1/0|1.234,56|5 remainder 2|\\frac{x}{2}|2x + 3|A5|"
    "3 + 4i|12:30 pm|2/3/4|(5,4)|1/2 or 2/1|10 - 2|5 ± 1|n^2|1;2|$3 to $5"
).split("|")


@pytest.mark.parametrize("answer", [*EXACT, *OTHERS])
def test_an_answer_that_is_not_one_number_is_refused_with_the_reward_that_fits(answer):
    with pytest.raises(
        ValueError, match="number; correct it, or choose another|; set env.options.reward = '(math|exact)'"
    ) as error:
        numerals.expected(answer)
    assert not (answer in EXACT and "'math'" in str(error.value))


@pytest.mark.parametrize(
    "answer",
    (
        "1/2|25 m^2|5 mol CO2|x = 5|n=5|-5|$5|5%|50 percent|3 1/2|\\frac{1}{2}|12 500|12,500|60 km/h|$5/hour|"
        "9.8 m/s^2|5°C|#### 72|so 48/2 = 24\n#### 72|It is \\boxed{72}|The answer is 72.|5 million|1e5|3 × 10^5|"
        "5 marbles|+7|5th|25 m²|25 cm^3|5 kg m^-3|.5|10^5|f(x) = 5|8 km / h|7 days (a week)|1.5e-3|5 decades|"
        "9 mice"
    ).split("|"),
)
def test_an_answer_with_one_number_is_taken(answer):
    assert numerals.expected(answer).equals(numerals.last(answer))


def test_hostile_text_takes_time_in_proportion_to_its_length():
    parts = "1|1,111|1 111 |(1 |(1, |\\frac{|\\sqrt[|-|1/|√|{|^{|1 |**|_|$|10^|– |\n \n|1 11/| |\\text |- |.|1'".split(
        "|"
    )
    begun_s = time.process_time()
    texts = [*(part * 65536 for part in parts), *("\\sqrt" + (end + " " * 65536) for end in ("", "[3]"))]
    assert all(numerals.last(text[:65536] + "x") != numerals.last("7.5") for text in texts)
    assert time.process_time() - begun_s < 0.5 * len(texts)  # 0.02 s each; a square of the length takes seconds
