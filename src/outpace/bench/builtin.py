"""Prompts that come with the package, so that benchmark and audits run without data."""

from __future__ import annotations

BUILT_IN: tuple[tuple[str, str, str], ...] = (
    (
        "story/1",
        "story",
        "Once upon a time there was a miller who had three sons and one old clock. Every evening, "
        "when the wheel stood still,",
    ),
    (
        "story/2",
        "story",
        "The lighthouse keeper's daughter had never seen a train. On the morning of her tenth "
        "birthday",
    ),
    (
        "code/1",
        "code",
        "def running_median(values: list[float], width: int) -> list[float]:\n"
        '    """Returns the median of each window of ``width`` values."""\n',
    ),
    (
        "code/2",
        "code",
        "import csv\n\n\ndef column_totals(path):\n    totals = {}\n    with open(path) as file:\n",
    ),
    (
        "maths/1",
        "maths",
        "Question: A baker makes 12 trays of 18 rolls and sells 5 rolls out of every 6. How many "
        "rolls are left?\nAnswer:",
    ),
    (
        "maths/2",
        "maths",
        "Question: A cyclist rides 45 km in the morning and half as far again in the afternoon. At "
        "15 km per hour, how long does she ride in all?\nAnswer:",
    ),
    (
        "chat/1",
        "chat",
        "User: My tomato plants have yellow leaves near the ground. What should I look at first?\n"
        "Assistant:",
    ),
    (
        "chat/2",
        "chat",
        "User: I would like to book a table for four on Saturday.\n"
        "Assistant: Certainly. At what time?\nUser: At half past seven.\nAssistant:",
    ),
    (
        "copy/1",
        "copy",
        "Passage: The old bridge was built in 1764 by Anna Lund's grandfather. It has three arches "
        "of grey stone, and the middle one is the widest.\n"
        "Correct the passage and repeat it with 1764 changed to 1746:\n",
    ),
    (
        "copy/2",
        "copy",
        "List: pears, apples, plums, cherries, quinces, apples.\n"
        "The same list in reverse order, without repetitions:",
    ),
    (
        "summary/1",
        "summary",
        "For three weeks the harbour had been closed by ice. Fishermen mended nets in their "
        "kitchens, and the price of flour rose twice. On Friday the wind turned, and by Sunday the "
        "first boat was out.\nIn one sentence:",
    ),
    (
        "summary/2",
        "summary",
        "The council met for four hours about the new school. Some wanted it by the river, where "
        "land is cheap; others feared floods. In the end they chose the hill, by seven votes to "
        "five.\nIn one sentence:",
    ),
)

CHATS: tuple[tuple[str, str, str], ...] = (
    (
        "code/roman",
        "code",
        "Write a Python function that turns a Roman numeral such as MCMXCIV into a number, and "
        "raises ValueError for text that is none. Add three short tests.",
    ),
    (
        "code/bug",
        "code",
        "This function should return the second largest of several numbers, and fails for "
        "[5, 5, 3]. Explain why, and correct it.\n\n"
        "def second(values):\n    values.sort()\n    return values[-2]\n",
    ),
    (
        "code/sql",
        "code",
        "There is a table orders(id, customer, placed_on, total). Write an SQL query for the three "
        "customers who spent most in 2024, with the number of their orders.",
    ),
    (
        "maths/tank",
        "maths",
        "A tank holds 900 litres. One pipe fills it in 45 minutes, and a leak would empty it in "
        "three hours. How long does it take to fill with the leak open? Show each step.",
    ),
    (
        "maths/shop",
        "maths",
        "A shop takes 20 % off a coat of 160 euros, and at the till another 15 % off that price. "
        "What is paid, and what single discount would be the same?",
    ),
    (
        "maths/dice",
        "maths",
        "Two dice are thrown. What is the chance that the larger number is exactly 4? Reason step "
        "by step.",
    ),
    (
        "text/letter",
        "text",
        "Write a short letter to a neighbour who feeds the pigeons on the balcony above mine. It "
        "should be friendly, and clear about what I ask for.",
    ),
    (
        "text/tides",
        "text",
        "Explain to a ten-year-old why the sea rises and falls twice a day.",
    ),
    (
        "text/story",
        "text",
        "Tell the beginning of a story about a night train that stops at a station which is on no "
        "map. About 150 words.",
    ),
    (
        "text/summary",
        "text",
        "Summarise in two sentences: The bridge was closed in March after a diver found cracks in "
        "two of its piers. Engineers first thought of steel collars, but the river bed proved too "
        "soft. Since then lorries go round by the old ferry road, which costs them forty minutes, "
        "and the bakers on the far bank have begun to sell bread from boats.",
    ),
)
"""Questions for instruct models, to be given through their chat template: (id, task, text)."""

FURTHER: tuple[tuple[str, str, str], ...] = (
    (
        "code/3",
        "code",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n",
    ),
    (
        "code/4",
        "code",
        "# Counts how often each word occurs in a text, without regard to case.\n"
        "def word_counts(text):\n",
    ),
    (
        "chat/3",
        "chat",
        "User: How do I get a coffee stain out of a cotton shirt?\nAssistant:",
    ),
    (
        "chat/4",
        "chat",
        "User: What is the difference between a lake and a pond?\nAssistant:",
    ),
    (
        "copy/3",
        "copy",
        "Original: The train to Lund leaves at ten. It stops in Eslov and arrives at noon. Seats "
        "cannot be booked.\nThe same text with Malmo in the place of Lund:",
    ),
    (
        "copy/4",
        "copy",
        "def area(width, height):\n    result = width * height\n    return result\n\n"
        "# The same function, with the name product in the place of result:\n",
    ),
)
"""Texts to continue, for models without a chat template, after `BUILT_IN`."""

FURTHER_CHATS: tuple[tuple[str, str, str], ...] = (
    (
        "code/primes",
        "code",
        "Write a Python function that returns all prime numbers below n with the sieve of "
        "Eratosthenes.",
    ),
)
"""Questions for instruct models, after `CHATS`."""
