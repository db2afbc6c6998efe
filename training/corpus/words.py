"""Word lists that several tasks share."""

NAMES = tuple(
    "Anna Ben Clara David Emma Felix Grace Henry Iris Jack Kate Leo Mia Noah Olivia Paul "
    "Rosa Sam Tina Victor Wendy Max Nora Oscar Lucy Peter Ruby Simon Zoe Adam Bella Carl "
    "Diana Eric Fiona George Hannah Ivan Julia Kevin Laura Mark Nina Omar Petra Ralph Sara "
    "Tom Vera Will Alice Bruno Cora Daniel Elena Frank Gina Hugo Ida Jonas Karen Lukas Maria "
    "Nils Otto Paula Robert Sofia Theo Ursula Yara Amir Chen Kofi Lena Mateo Priya Ravi "
    "Yuki".split()
)
THINGS = tuple(
    "apple book pencil coin stone marble button card shell ticket cup plate candle flower "
    "lamp basket key ring hat kite ball drum bell map boat clock spoon pillow ladder "
    "lantern".split()
)
COLOURS = tuple(
    "red blue green yellow black white brown purple orange pink grey silver golden".split()
)
FRUITS = tuple("apples pears plums cherries grapes bananas peaches lemons figs melons".split())
ANIMALS = tuple(
    "dog cat horse cow sheep goat pig duck hen fox wolf bear rabbit mouse owl frog lion "
    "tiger monkey elephant crow donkey hedgehog squirrel otter badger beaver turtle".split()
)
JOBS = tuple(
    "baker teacher doctor farmer painter driver singer writer nurse pilot gardener tailor "
    "cook dentist lawyer sailor engineer librarian carpenter fisherman".split()
)
PLACES = tuple(
    "kitchen garden library attic cellar garage office bedroom hallway barn shed workshop "
    "museum station harbour market school tower theatre bakery".split()
)
HOBBIES = tuple(
    "chess painting swimming cooking reading dancing hiking fishing singing gardening "
    "cycling skating sewing running drawing".split()
)
FOODS = tuple(
    "soup bread rice pasta pizza salad cheese honey cake pie porridge pancakes beans noodles "
    "stew fish potatoes tomatoes eggs curry".split()
)
