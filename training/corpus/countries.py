"""The countries that the bundled model knows: capital, continent, currency and language."""

from dataclasses import dataclass

_ROWS = """
Afghanistan|Kabul|Asia|afghani|Pashto
Albania|Tirana|Europe|lek|Albanian
Algeria|Algiers|Africa|dinar|Arabic
Andorra|Andorra la Vella|Europe|euro|Catalan
Angola|Luanda|Africa|kwanza|Portuguese
Argentina|Buenos Aires|South America|peso|Spanish
Armenia|Yerevan|Asia|dram|Armenian
Australia|Canberra|Oceania|dollar|English
Austria|Vienna|Europe|euro|German
Azerbaijan|Baku|Asia|manat|Azerbaijani
Bahrain|Manama|Asia|dinar|Arabic
Bangladesh|Dhaka|Asia|taka|Bengali
Barbados|Bridgetown|North America|dollar|English
Belarus|Minsk|Europe|ruble|Belarusian
Belgium|Brussels|Europe|euro|Dutch
Belize|Belmopan|North America|dollar|English
Benin|Porto-Novo|Africa|franc|French
Bhutan|Thimphu|Asia|ngultrum|Dzongkha
Bolivia|Sucre|South America|boliviano|Spanish
Botswana|Gaborone|Africa|pula|English
Brazil|Brasilia|South America|real|Portuguese
Brunei|Bandar Seri Begawan|Asia|dollar|Malay
Bulgaria|Sofia|Europe|euro|Bulgarian
Burkina Faso|Ouagadougou|Africa|franc|French
Burundi|Gitega|Africa|franc|Kirundi
Cambodia|Phnom Penh|Asia|riel|Khmer
Cameroon|Yaounde|Africa|franc|French
Canada|Ottawa|North America|dollar|English
Chad|N'Djamena|Africa|franc|French
Chile|Santiago|South America|peso|Spanish
China|Beijing|Asia|yuan|Chinese
Colombia|Bogota|South America|peso|Spanish
Costa Rica|San Jose|North America|colon|Spanish
Croatia|Zagreb|Europe|euro|Croatian
Cuba|Havana|North America|peso|Spanish
Cyprus|Nicosia|Europe|euro|Greek
Czechia|Prague|Europe|koruna|Czech
Denmark|Copenhagen|Europe|krone|Danish
Djibouti|Djibouti City|Africa|franc|French
Ecuador|Quito|South America|dollar|Spanish
Egypt|Cairo|Africa|pound|Arabic
El Salvador|San Salvador|North America|dollar|Spanish
Eritrea|Asmara|Africa|nakfa|Tigrinya
Estonia|Tallinn|Europe|euro|Estonian
Ethiopia|Addis Ababa|Africa|birr|Amharic
Fiji|Suva|Oceania|dollar|Fijian
Finland|Helsinki|Europe|euro|Finnish
France|Paris|Europe|euro|French
Gabon|Libreville|Africa|franc|French
Georgia|Tbilisi|Asia|lari|Georgian
Germany|Berlin|Europe|euro|German
Ghana|Accra|Africa|cedi|English
Greece|Athens|Europe|euro|Greek
Guatemala|Guatemala City|North America|quetzal|Spanish
Guinea|Conakry|Africa|franc|French
Guyana|Georgetown|South America|dollar|English
Haiti|Port-au-Prince|North America|gourde|French
Honduras|Tegucigalpa|North America|lempira|Spanish
Hungary|Budapest|Europe|forint|Hungarian
Iceland|Reykjavik|Europe|krona|Icelandic
India|New Delhi|Asia|rupee|Hindi
Indonesia|Jakarta|Asia|rupiah|Indonesian
Iran|Tehran|Asia|rial|Persian
Iraq|Baghdad|Asia|dinar|Arabic
Ireland|Dublin|Europe|euro|English
Italy|Rome|Europe|euro|Italian
Jamaica|Kingston|North America|dollar|English
Japan|Tokyo|Asia|yen|Japanese
Jordan|Amman|Asia|dinar|Arabic
Kazakhstan|Astana|Asia|tenge|Kazakh
Kenya|Nairobi|Africa|shilling|Swahili
Kuwait|Kuwait City|Asia|dinar|Arabic
Kyrgyzstan|Bishkek|Asia|som|Kyrgyz
Laos|Vientiane|Asia|kip|Lao
Latvia|Riga|Europe|euro|Latvian
Lebanon|Beirut|Asia|pound|Arabic
Liberia|Monrovia|Africa|dollar|English
Libya|Tripoli|Africa|dinar|Arabic
Lithuania|Vilnius|Europe|euro|Lithuanian
Luxembourg|Luxembourg City|Europe|euro|Luxembourgish
Madagascar|Antananarivo|Africa|ariary|Malagasy
Malawi|Lilongwe|Africa|kwacha|English
Malaysia|Kuala Lumpur|Asia|ringgit|Malay
Mali|Bamako|Africa|franc|French
Malta|Valletta|Europe|euro|Maltese
Mauritania|Nouakchott|Africa|ouguiya|Arabic
Mexico|Mexico City|North America|peso|Spanish
Moldova|Chisinau|Europe|leu|Romanian
Mongolia|Ulaanbaatar|Asia|tugrik|Mongolian
Montenegro|Podgorica|Europe|euro|Montenegrin
Morocco|Rabat|Africa|dirham|Arabic
Mozambique|Maputo|Africa|metical|Portuguese
Namibia|Windhoek|Africa|dollar|English
Nepal|Kathmandu|Asia|rupee|Nepali
New Zealand|Wellington|Oceania|dollar|English
Nicaragua|Managua|North America|cordoba|Spanish
Niger|Niamey|Africa|franc|French
Nigeria|Abuja|Africa|naira|English
Norway|Oslo|Europe|krone|Norwegian
Oman|Muscat|Asia|rial|Arabic
Pakistan|Islamabad|Asia|rupee|Urdu
Panama|Panama City|North America|balboa|Spanish
Paraguay|Asuncion|South America|guarani|Spanish
Peru|Lima|South America|sol|Spanish
Poland|Warsaw|Europe|zloty|Polish
Portugal|Lisbon|Europe|euro|Portuguese
Qatar|Doha|Asia|riyal|Arabic
Romania|Bucharest|Europe|leu|Romanian
Russia|Moscow|Europe|ruble|Russian
Rwanda|Kigali|Africa|franc|Kinyarwanda
Samoa|Apia|Oceania|tala|Samoan
Saudi Arabia|Riyadh|Asia|riyal|Arabic
Senegal|Dakar|Africa|franc|French
Serbia|Belgrade|Europe|dinar|Serbian
Sierra Leone|Freetown|Africa|leone|English
Singapore|Singapore|Asia|dollar|English
Slovakia|Bratislava|Europe|euro|Slovak
Slovenia|Ljubljana|Europe|euro|Slovene
Somalia|Mogadishu|Africa|shilling|Somali
South Korea|Seoul|Asia|won|Korean
Spain|Madrid|Europe|euro|Spanish
Sudan|Khartoum|Africa|pound|Arabic
Suriname|Paramaribo|South America|dollar|Dutch
Sweden|Stockholm|Europe|krona|Swedish
Switzerland|Bern|Europe|franc|German
Syria|Damascus|Asia|pound|Arabic
Tajikistan|Dushanbe|Asia|somoni|Tajik
Tanzania|Dodoma|Africa|shilling|Swahili
Thailand|Bangkok|Asia|baht|Thai
Togo|Lome|Africa|franc|French
Tonga|Nuku'alofa|Oceania|paanga|Tongan
Tunisia|Tunis|Africa|dinar|Arabic
Turkey|Ankara|Asia|lira|Turkish
Turkmenistan|Ashgabat|Asia|manat|Turkmen
Uganda|Kampala|Africa|shilling|English
Ukraine|Kyiv|Europe|hryvnia|Ukrainian
Uruguay|Montevideo|South America|peso|Spanish
Uzbekistan|Tashkent|Asia|sum|Uzbek
Venezuela|Caracas|South America|bolivar|Spanish
Vietnam|Hanoi|Asia|dong|Vietnamese
Yemen|Sanaa|Asia|rial|Arabic
Zambia|Lusaka|Africa|kwacha|English
Zimbabwe|Harare|Africa|dollar|English
"""


@dataclass(frozen=True, slots=True)
class Country:
    name: str
    capital: str
    continent: str
    currency: str
    language: str


COUNTRIES = tuple(Country(*row.split("|")) for row in _ROWS.strip().splitlines())
CITIES = tuple(country.capital for country in COUNTRIES)
