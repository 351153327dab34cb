"""The prompts of the real-model goldens: short, prose, code, many scripts, digits, and one of some 600 tokens."""

LONG = """The lighthouse at Carrow Point was built in 1874, after the third wreck in a single winter. \
Before that there had been only a bonfire, kept by whichever family lived nearest, and on the worst \
nights, when it was needed most, the rain put it out. The engineer who came to survey the rock was a \
careful man named Elias Thorne. He measured the tides for eleven months before he let anybody lay a \
stone, and he wrote everything down in a notebook with a green cover, which is still kept in the museum.

His plan had four parts. First, a jetty on the sheltered side, so that boats could land in a swell of up to two \
metres. Second, a railway of sixty metres, hauled by a hand winch, to bring the blocks up from the jetty. Third, \
the tower itself: forty-one metres of granite, each block cut to lock into its neighbours, so that the sea could \
never lift one without lifting them all. Fourth, the lamp, which burned paraffin and turned once every thirty \
seconds on a bath of mercury.

The work took three summers. In the first they lost the jetty twice; Thorne redrew it with a curved face, and \
the third one stands today. In the second summer the railway was finished, and nine courses of stone were laid. \
A man named Peter Allan fell from the scaffold and broke his leg, and was carried to the mainland by a fishing \
boat; he came back the following year as the cook. In the third summer they reached the gallery, and on the \
first of November the lamp was lit. People walked out along the cliffs in the dark to see it. A child is \
supposed to have asked whether it would be put out again when the rain came.

There were three keepers at a time. They worked six weeks on the rock and two ashore, and each watch lasted four \
hours. Their logbooks are mostly weather, but now and then something else gets in. In 1891 one of them recorded \
that a flock of starlings had covered the lantern so thickly that he could not see the sea. In 1903 another \
complained that the new tea was worse than the old. In 1917 the lamp was dark by order for eleven nights, and \
nobody wrote a word.

Electricity came in 1956, and in 1988 the last keepers left. They took the clock, the teapot and the green \
notebook with them. Since then the light has been watched from an office two hundred kilometres away, by a \
machine which knows whether the lamp is turning, but not whether there are starlings. Every spring an engineer \
goes out by helicopter to clean the lens.

Here is a short summary of the history above. The lighthouse was built because"""

PROMPTS = {
    "short": "The capital of France is",
    "prose": "Once upon a time there was a small village at the edge of a forest. Every evening the oldest woman told "
    "a story to the children. One night, she began differently: she put a wooden box on the table, and said nothing. "
    "The children",
    "code": "def fibonacci(n: int) -> list[int]:\n"
    '    """Return the first n Fibonacci numbers."""\n'
    "    numbers = [0, 1]\n"
    "    while len(numbers) < n:\n"
    "        numbers.append(",
    "multilingual": "English: good morning. Français : bonjour. Deutsch: schönen guten Morgen. Русский: доброе утро. "
    "日本語：おはようございます。 हिन्दी: सुप्रभात। Español:",
    "digits": "Date\tOpen\tClose\n2024-01-02\t187.15\t185.64\n2024-01-03\t184.22\t184.25\n\n\n"
    "   Totals:  1234567890 + 1 =",
    "long": LONG,
}

CHAT_QUESTION = "What is the capital of France?"
CHAT_ANSWER = "Paris"
